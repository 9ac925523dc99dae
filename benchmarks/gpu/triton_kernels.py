"""Kernels in Triton beside which kvferry's own operations are measured: decode that reads the pages in place, and the
copy of many pieces. kvferry does not use them. With TRITON_INTERPRET=1 they run on a CPU.

Run on a GPU: never. As a program, compiles them for a GPU that need not be there:

    python -m gpu.triton_kernels 90
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"
from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from gpu.context import import_triton
from kvferry.engine.ops.batch import AttentionBatch

triton = import_triton()
import triton.language as tl  # noqa: E402 - only now on the path

ROWS = 16
"""Rows of a tile of queries: `tl.dot` needs as many."""


@triton.jit
def decode_split(
    query, cache, tables, contexts, partial, maxima, sums,
    scale, table_stride, block_stride, head_stride, blocks_per_split, num_splits,
    kv_heads: tl.constexpr, group: tl.constexpr, group_rows: tl.constexpr, block_size: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Attention of one sequence's new token, for the heads of one KV head, to a part of its pages."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, columns, positions = tl.arange(0, group_rows), tl.arange(0, dim), tl.arange(0, block_size)
    query_rows = (sequence * kv_heads + head) * group + rows
    q = tl.load(query + query_rows[:, None] * dim + columns[None, :], mask=rows[:, None] < group, other=0.0)
    length = tl.load(contexts + sequence)
    best = tl.full([group_rows], float("-inf"), tl.float32)
    total = tl.zeros([group_rows], tl.float32)
    acc = tl.zeros([group_rows, dim], tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(length, block_size))
    for index in range(first, last):
        number = tl.load(tables + sequence * table_stride + index).to(tl.int64)
        page = cache + number * block_stride + head * head_stride
        offsets = positions[:, None] * dim + columns[None, :]
        visible = index * block_size + positions < length
        keys = tl.load(page + offsets, mask=visible[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        values = tl.load(page + block_size * dim + offsets, mask=visible[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    out_rows = query_rows * num_splits + split
    tl.store(partial + out_rows[:, None] * dim + columns[None, :], acc, mask=rows[:, None] < group)
    tl.store(maxima + out_rows, best, mask=rows < group)
    tl.store(sums + out_rows, total, mask=rows < group)


@triton.jit
def copy_pieces(pieces, count, step: tl.constexpr):
    """Copy `count` pieces of whole 16 bytes; `pieces`: int64 [count, 3] with source, target and length in bytes."""
    index = tl.program_id(0)
    while index < count:
        source = tl.load(pieces + index * 3).to(tl.pointer_type(tl.int64))
        target = tl.load(pieces + index * 3 + 1).to(tl.pointer_type(tl.int64))
        words = tl.load(pieces + index * 3 + 2) // 8
        for start in range(0, words, step):
            offsets = start + tl.arange(0, step)
            tl.store(target + offsets, tl.load(source + offsets, mask=offsets < words), mask=offsets < words)
        index += tl.num_programs(0)


def paged_decode(query: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, num_splits: int) -> Tensor:
    """As `kvferry.engine.ops.attention.paged_attention`, for one new token a sequence and keys as long as values.

    query [B, heads, dim], cache [num_blocks, kv_heads, block_size * 2 * dim] → [B, heads, dim].
    """
    rows, heads, dim = query.shape
    kv_heads, block_size = cache.shape[1], batch.block_size
    group = heads // kv_heads
    group_rows = max(ROWS, triton.next_power_of_2(group))
    most_blocks = -(-batch.max_context_len // block_size)
    num_splits = min(num_splits, most_blocks)
    per_split = -(-most_blocks // num_splits)
    shape = (rows, heads, num_splits)
    partial = torch.empty(*shape, dim, dtype=torch.float32, device=query.device)
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    decode_split[(rows, kv_heads, num_splits)](
        query.contiguous(), cache, batch.block_tables, batch.context_lens, partial, maxima, sums,
        scale, batch.block_tables.stride(0), cache.stride(0), cache.stride(1), per_split, num_splits,
        kv_heads=kv_heads, group=group, group_rows=group_rows, block_size=block_size, dim=dim,
    )  # fmt: skip
    weights = torch.exp(maxima - maxima.amax(2, keepdim=True))
    scaled = (partial * weights[..., None]).sum(2) / (sums * weights).sum(2)[..., None]
    return scaled.to(query.dtype)


def copy_with_triton(table: Tensor, *, num_programs: int) -> None:
    """Copy pieces; `table` as for `copy_pieces`."""
    copy_pieces[(min(num_programs, len(table)),)](table, len(table), step=1024)


def compile_for(capability: int) -> list[str]:
    """Compile the kernels for a GPU of this compute capability (such as 90), with bfloat16; returns the names of the
    kernels. Raises what Triton raises over a mistake in them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = []
    pointers = dict.fromkeys(("partial", "maxima", "sums"), "*fp32")
    signatures: list[tuple[Any, dict[str, str], dict[str, int]]] = [
        (
            decode_split,
            {"query": "*bf16", "cache": "*bf16", "tables": "*i32", "contexts": "*i32", **pointers, "scale": "fp32"},
            {"kv_heads": 8, "group": 4, "group_rows": 16, "block_size": 16, "dim": 128},
        ),
        (copy_pieces, {"pieces": "*i64"}, {"step": 1024}),
    ]
    for kernel, types, constants in signatures:
        signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"], f"{kernel.__name__} has no machine code"
        names.append(kernel.__name__)
    return names


if __name__ == "__main__":
    print(" ".join(compile_for(int(sys.argv[1]))))
