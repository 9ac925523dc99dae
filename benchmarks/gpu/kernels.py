"""Step *kernels*: attention over the paged KV cache, beside PyTorch's on KV that is gathered already, FlashAttention,
and a Triton kernel that reads the pages in place; and whether the copy kernel assembles.

Decode is judged by the KV that it reads in a second, beside what a copy within the card's memory reads and writes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gpu.context import Context, seconds_of
from gpu.ptx import ARCHITECTURES, assemble, find_ptxas
from gpu.records import NotPossible
from kvferry.engine.ops.attention import paged_attention
from kvferry.engine.ops.batch import AttentionBatch

GOAL = 0.7
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
STEP_TOKENS = 2048
"""New tokens of a prefill step, shared by its sequences."""
OWN, SDPA = "kvferry", "SDPA on gathered KV"
"""The sides that have to run."""
CELL_S = 0.35
"""Seconds for which one side of one cell is repeated."""


@dataclass(frozen=True)
class Cell:
    """So many sequences of one context length; `query_len`: new tokens of each."""

    kind: str
    rows: int
    context: int
    query_len: int

    def __str__(self) -> str:
        length = f"{self.context // 1024}k" if self.context >= 4096 else str(self.context)
        return f"{self.kind} b{self.rows}, context {length}"


def cells(small: bool) -> list[Cell]:
    """The cells, the quick ones first."""
    batches, contexts = ((1, 3), (40,)) if small else ((1, 8, 64), (512, 4096, 32768))
    pairs = sorted(((rows, context) for rows in batches for context in contexts), key=lambda pair: pair[0] * pair[1])
    decode = [Cell("decode", rows, context, 1) for rows, context in pairs]
    return decode + [
        Cell("prefill", rows, context, max(2, min(context, STEP_TOKENS) // rows)) for rows, context in pairs
    ]


class Inputs:
    """One step's queries, and a cache whose pages lie apart."""

    def __init__(self, cell: Cell, device: str, dtype: torch.dtype) -> None:
        self.cell, self.device, self.dtype = cell, device, dtype
        per_row = -(-cell.context // BLOCK)
        order = np.random.default_rng(cell.rows).permutation(cell.rows * per_row)
        tables = order.reshape(cell.rows, per_row)
        generator = torch.Generator(device).manual_seed(1)
        shape = (cell.rows * per_row, KV_HEADS, BLOCK * 2 * DIM)
        self.cache = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        tokens = cell.rows * cell.query_len
        self.query = torch.randn(tokens, HEADS, DIM, device=device, dtype=dtype, generator=generator)
        self.batch = AttentionBatch.build(
            [cell.query_len] * cell.rows, [cell.context] * cell.rows, tables.tolist(), block_size=BLOCK, device=device
        )
        self.tables = torch.from_numpy(tables).to(device)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that the step has to read."""
        return self.cell.rows * self.cell.context * KV_HEADS * 2 * DIM * self.cache.element_size()

    @cached_property
    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values in sequence order: [rows, kv_heads, context, dim]."""
        pages = self.cache[self.tables.flatten()].view(self.cell.rows, -1, KV_HEADS, 2, BLOCK, DIM)
        keys, values = (pages[:, :, :, part].transpose(1, 2).flatten(2, 3) for part in (0, 1))
        return keys[:, :, : self.cell.context].contiguous(), values[:, :, : self.cell.context].contiguous()

    @cached_property
    def rows_of_queries(self) -> Tensor:
        """The queries as [rows, heads, query_len, dim]."""
        shape = (self.cell.rows, self.cell.query_len, HEADS, DIM)
        return self.query.view(shape).transpose(1, 2).contiguous()


Side = Callable[[Inputs], Callable[[], Tensor]]
"""Prepares what may be prepared; the call it returns is timed, and returns [tokens, heads, dim]."""


def run(context: Context) -> None:
    """All cells, those of decode first."""
    _assemble(context)
    dtype = torch.float32 if context.small else torch.bfloat16
    memory = _memory_rate(context)
    context.record.duration("a copy within the card's memory, read and written", memory, "GB/s")
    sides = {OWN: _kvferry, SDPA: _sdpa, **_others(context)}
    agrees: dict[str, list[str]] = {name: [] for name in sides}
    for cell in cells(context.small):
        if not context.small and not _fits(cell):
            context.record.note(f"{cell}: left out, as the card has too little memory for gathered KV and a mask")
            continue
        with torch.inference_mode():
            _measure(context, Inputs(cell, context.device, dtype), sides, memory, agrees)
        if not context.small:
            torch.cuda.empty_cache()
    for name, wrong in agrees.items():
        context.record.check(f"{name} computes the attention that SDPA computes", not wrong, "; ".join(wrong))


def _measure(
    context: Context, inputs: Inputs, sides: dict[str, Side], memory: float, agrees: dict[str, list[str]]
) -> None:
    cell, budget = inputs.cell, 0.05 if context.small else CELL_S
    expected = _sdpa(inputs)()
    tolerance = 2e-5 if inputs.dtype == torch.float32 else 2e-2
    seconds: dict[str, float] = {}
    for name, side in list(sides.items()):
        if cell.kind == "prefill" and name.startswith("Triton"):
            continue
        try:
            call = side(inputs)
            difference = (call() - expected).abs().max().item()
        except Exception as error:
            if name in (OWN, SDPA):
                raise
            context.record.note(f"{name} does not run ({cell}): {(str(error).splitlines() or [repr(error)])[0]}")
            del sides[name], agrees[name]
            continue
        if not difference <= tolerance:
            agrees[name].append(f"{cell} by {difference:.2g}")
        seconds[name] = seconds_of(call, context.device, budget_s=budget)
    for name, taken in seconds.items():
        if cell.kind == "decode":
            goal = GOAL if name == OWN and not context.small else None
            rate = inputs.kv_bytes / taken / 1e9
            context.record.rate(f"{cell}: {name}", rate, "GB/s", ("the card's memory", memory), goal)
        else:
            baseline = (SDPA, seconds[SDPA] * 1e3)
            context.record.duration(f"{cell}: {name}", taken * 1e3, "ms", baseline)


def _memory_rate(context: Context) -> float:
    source = torch.zeros(2**24 if context.small else 2**31, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source), context.device, budget_s=0.3) / 1e9


def _fits(cell: Cell) -> bool:
    """True if cache, gathered copies and the mask of the reference fit into the free memory."""
    kv = cell.rows * cell.context * KV_HEADS * 2 * DIM * 2
    mask = cell.rows * cell.query_len * (HEADS // KV_HEADS) * cell.context * 3
    return 4 * kv + mask < 0.9 * torch.cuda.mem_get_info()[0]


def _kvferry(inputs: Inputs) -> Callable[[], Tensor]:
    """The operation as a layer calls it."""
    return lambda: paged_attention(inputs.query, inputs.cache, inputs.batch, scale=DIM**-0.5)


def _sdpa(inputs: Inputs) -> Callable[[], Tensor]:
    from torch.nn.attention.bias import causal_lower_right

    (keys, values), queries, cell = inputs.gathered, inputs.rows_of_queries, inputs.cell
    mask: Any = None if cell.query_len == 1 else causal_lower_right(cell.query_len, cell.context)

    def call(mask: Any = mask) -> Tensor:
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, HEADS, DIM)

    try:
        call()
    except RuntimeError:  # no kernel takes this bias with grouped heads: a mask then
        visible = torch.ones(cell.query_len, cell.context, dtype=torch.bool, device=inputs.device)
        return partial(call, visible.tril(cell.context - cell.query_len))
    return call


def _others(context: Context) -> dict[str, Side]:
    """FlashAttention, where it can be imported, and Triton's kernel."""
    sides: dict[str, Side] = {}
    if not context.small:
        for name in ("vllm.vllm_flash_attn", "flash_attn"):
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                sides["FlashAttention, paged"] = _flash_attention(name)
                break
        else:
            context.record.note("FlashAttention is not installed, neither by itself nor with vLLM")
    try:
        from gpu.triton_kernels import paged_decode
    except NotPossible as reason:
        context.record.note(str(reason))
        return sides
    programs = 8 if context.small else 4 * torch.cuda.get_device_properties(0).multi_processor_count

    def triton_decode(inputs: Inputs) -> Callable[[], Tensor]:
        splits = max(1, programs // (inputs.cell.rows * KV_HEADS))
        return lambda: paged_decode(inputs.query, inputs.cache, inputs.batch, scale=DIM**-0.5, num_splits=splits)

    sides["Triton, pages read in place"] = triton_decode
    _check_copies(context)
    if context.small:
        _compile(context)
    return sides


def _flash_attention(module: str) -> Side:
    """FlashAttention over pages in the layout that it needs, made before it is timed. Never run."""

    def side(inputs: Inputs) -> Callable[[], Tensor]:
        attend = importlib.import_module(module).flash_attn_varlen_func
        pages = inputs.cache.view(-1, KV_HEADS, 2, BLOCK, DIM)
        keys, values = (pages[:, :, part].transpose(1, 2).contiguous() for part in (0, 1))
        cell, batch = inputs.cell, inputs.batch
        shared: dict[str, Any] = {"softmax_scale": DIM**-0.5, "causal": True, "block_table": batch.block_tables}
        if module == "flash_attn":
            ends = torch.arange(cell.rows + 1, device=inputs.device, dtype=torch.int32) * cell.context
            shared |= {"cu_seqlens_k": ends}
        else:
            shared |= {"seqused_k": batch.context_lens}

        def call() -> Tensor:
            out: Tensor = attend(
                inputs.query,
                keys,
                values,
                cu_seqlens_q=batch.query_starts,
                max_seqlen_q=cell.query_len,
                max_seqlen_k=cell.context,
                **shared,
            )
            return out

        return call

    return side


def _check_copies(context: Context) -> None:
    """Triton's copy of pieces, compared byte by byte."""
    from gpu.triton_kernels import copy_with_triton

    num_pieces, length = (5, 48) if context.small else (1000, 65536)
    source = torch.randint(0, 256, (num_pieces * length,), dtype=torch.uint8, device=context.device)
    target = torch.zeros_like(source)
    order = np.random.default_rng(1).permutation(num_pieces) * length
    rows = [
        (source.data_ptr() + index * length, target.data_ptr() + int(block), length)
        for index, block in enumerate(order)
    ]
    table = torch.tensor(rows, dtype=torch.int64, device=context.device)
    copy_with_triton(table, num_programs=64)
    expected = torch.zeros_like(source)
    for index, block in enumerate(order.tolist()):
        expected[block : block + length] = source[index * length : (index + 1) * length]
    context.record.check("Triton's kernel copies pieces", bool(torch.equal(target, expected)))


def _compile(context: Context) -> None:
    """Compile Triton's kernels in bfloat16 for a GPU that is not there; the compiler is stricter than the
    interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(context.scratch("triton"))}
    command = [sys.executable, "-m", "gpu.triton_kernels", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    detail = (done.stderr.strip().splitlines() or [""])[-1]
    context.record.check("Triton's kernels compile for compute capability 9.0", done.returncode == 0, detail)


def _assemble(context: Context) -> None:
    try:
        ptxas = find_ptxas()
    except NotPossible as reason:
        context.record.note(str(reason))
        return
    wrong = {architecture: assemble(ptxas, architecture) for architecture in ARCHITECTURES}
    faults = [f"{architecture}: {text}" for architecture, text in wrong.items() if text]
    name = f"copy.ptx assembles for {', '.join(ARCHITECTURES)}"
    context.record.check(name, not faults, "; ".join(faults))
