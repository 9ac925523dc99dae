"""The kernel against plain PyTorch, and plain PyTorch against attention written out token by token."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.engine.ops import attention, reference
from kvferry.engine.ops.batch import AttentionBatch
from kvferry.engine.ops.native import library

needs_native = pytest.mark.skipif(library() is None, reason="no compiler here")


@dataclass
class Case:
    """Sequences in a paged cache, and new tokens that look at them."""

    query: Tensor
    cache: Tensor
    batch: AttentionBatch
    value_dim: int


def make_case(
    lens: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`lens` are (new tokens, context) of each sequence; its blocks lie scattered among blocks of garbage."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in lens]
    free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    cache = torch.randn(sum(counts) + 3, kv_heads, block_size * (key_dim + value_dim), generator=generator)
    batch = AttentionBatch.build([n for n, _ in lens], [c for _, c in lens], tables, block_size=block_size)
    query = torch.randn(batch.num_tokens, heads, key_dim, generator=generator)
    return Case(query.to(dtype), cache.to(dtype), batch, value_dim)


def written_out(case: Case, *, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Token by token and head by head, in float64."""
    keys, values = reference.cache_views(case.cache.double(), case.query.shape[2], case.value_dim)
    rows, batch, group = [], case.batch, case.query.shape[1] // case.cache.shape[1]
    for sequence, (start, end) in enumerate(itertools.pairwise(batch.query_starts.tolist())):
        blocks = batch.block_tables[sequence].long()
        for token in range(start, end):
            position = int(batch.positions[token])
            low = 0 if window is None else max(0, position - window + 1)
            for head in range(case.query.shape[1]):
                key = keys[blocks, head // group].flatten(0, 1)[low : position + 1]
                value = values[blocks, head // group].flatten(0, 1)[low : position + 1]
                scores = key @ case.query[token, head].double() * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                extra = [] if sinks is None else [sinks[head : head + 1].double()]
                rows.append(torch.cat([scores, *extra]).softmax(0)[: len(scores)] @ value)
    return torch.stack(rows).view(batch.num_tokens, case.query.shape[1], case.value_dim)


TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
MIXED = [(1, 40), (7, 7), (1, 1), (5, 33), (20, 60)]
SETTINGS: list[dict[str, Any]] = [
    {"window": None, "softcap": None, "sinks": False},
    {"window": 9, "softcap": None, "sinks": False},
    {"window": None, "softcap": 5.0, "sinks": False},
    {"window": None, "softcap": None, "sinks": True},
    {"window": 25, "softcap": 3.0, "sinks": True},
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


def call_settings(setting: dict[str, Any], case: Case) -> dict[str, Any]:
    sinks = torch.linspace(-1, 2, case.query.shape[1]) if setting["sinks"] else None
    return {**setting, "sinks": sinks, "scale": case.query.shape[2] ** -0.5}


@each_setting
def test_reference_is_attention_written_out(setting: dict[str, Any]) -> None:
    case = make_case(MIXED, key_dim=24, value_dim=16, block_size=8)
    settings = call_settings(setting, case)
    found = reference.paged_attention(case.query, case.cache, case.batch, value_dim=case.value_dim, **settings)
    torch.testing.assert_close(found.double(), written_out(case, **settings), rtol=1e-5, atol=2e-6)


SHAPES: list[dict[str, Any]] = [
    {"heads": 6, "kv_heads": 2, "key_dim": 64, "value_dim": 64, "block_size": 32},
    {"heads": 4, "kv_heads": 4, "key_dim": 16, "value_dim": 16, "block_size": 8},
    {"heads": 8, "kv_heads": 1, "key_dim": 80, "value_dim": 80, "block_size": 16},
    {"heads": 32, "kv_heads": 2, "key_dim": 128, "value_dim": 128, "block_size": 64},
    {"heads": 2, "kv_heads": 2, "key_dim": 192, "value_dim": 128, "block_size": 256},
    {"heads": 3, "kv_heads": 1, "key_dim": 256, "value_dim": 256, "block_size": 128},
    {"heads": 2, "kv_heads": 1, "key_dim": 40, "value_dim": 24, "block_size": 8},
]


@needs_native
@each_setting
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(str(value) for value in shape.values()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_is_the_reference(dtype: torch.dtype, shape: dict[str, Any], setting: dict[str, Any]) -> None:
    case = make_case([*MIXED, (1, 300), (130, 290), (3, 200)], dtype=dtype, **shape)
    settings = call_settings(setting, case)
    found = attention.paged_attention(case.query, case.cache, case.batch, **settings)
    expected = reference.paged_attention(
        case.query.float(), case.cache.float(), case.batch, value_dim=case.value_dim, **settings
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, **TOLERANCE[dtype])


@needs_native
@each_setting
@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype, what: str, setting: dict[str, Any]) -> None:
    """Else the request whose KV is broken would get an answer instead of an error; and nobody beside it is touched."""
    lens = [(1, 40), (9, 33), (150, 150), (1, 7)]
    for sequence, ((new, context), first) in enumerate(zip(lens, [0, 1, 10, 160], strict=True)):
        case = make_case(lens, dtype=dtype)
        settings = call_settings(setting, case)
        expected = attention.paged_attention(case.query, case.cache, case.batch, **settings)
        keys, values = reference.cache_views(case.cache, case.query.shape[2], case.value_dim)
        if what == "query":
            case.query[first + new - 1] = float("nan")
        else:
            block = int(case.batch.block_tables[sequence][(context - 1) // 16])
            (keys if what == "key" else values)[block, :, (context - 1) % 16] = float("nan")
        found = attention.paged_attention(case.query, case.cache, case.batch, **settings)
        others = torch.ones(case.batch.num_tokens, dtype=torch.bool)
        others[first : first + new] = False
        assert found[first + new - 1].isnan().all(), sequence
        assert torch.equal(found[others], expected[others]), sequence


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_is_the_reference_on_random_batches(dtype: torch.dtype) -> None:
    chooser = random.Random(5)
    for seed in range(25):
        lens = []
        for _ in range(chooser.randint(1, 6)):
            context = chooser.choice([chooser.randint(1, 20), chooser.randint(1, 400)])
            lens.append((chooser.choice([1, chooser.randint(1, context)]), context))
        kv_heads = chooser.choice([1, 2, 3])
        case = make_case(
            lens,
            heads=kv_heads * chooser.choice([1, 2, 3, 5, 8, 13]),
            kv_heads=kv_heads,
            key_dim=chooser.choice([8, 32, 64, 96, 100]),
            value_dim=chooser.choice([8, 32, 64, 96, 100]),
            block_size=chooser.choice([8, 16, 32, 64, 128, 256]),
            dtype=dtype,
            seed=seed,
        )
        settings = call_settings(chooser.choice(SETTINGS) | {"window": chooser.choice([None, 1, 2, 50, 128])}, case)
        found = attention.paged_attention(case.query, case.cache, case.batch, **settings)
        expected = reference.paged_attention(
            case.query.float(), case.cache.float(), case.batch, value_dim=case.value_dim, **settings
        )
        torch.testing.assert_close(found.float(), expected, **TOLERANCE[dtype])


@needs_native
def test_without_causality_every_key_is_seen() -> None:
    case = make_case([(4, 150), (200, 200)])
    found = attention.paged_attention(case.query, case.cache, case.batch, scale=0.1, causal=False)
    expected = reference.paged_attention(case.query, case.cache, case.batch, value_dim=64, scale=0.1, causal=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_native
def test_the_number_of_threads_changes_nothing() -> None:
    case = make_case([(1, 100), (300, 300), (1, 40), (17, 90)])
    native = library()
    assert native is not None
    alone = attention.paged_attention(case.query, case.cache, case.batch, scale=0.1)
    native.set_threads(3)
    together = attention.paged_attention(case.query, case.cache, case.batch, scale=0.1)
    native.set_threads(torch.get_num_threads())
    assert torch.equal(alone, together)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_garbage_behind_the_end_of_a_sequence_is_not_read(dtype: torch.dtype) -> None:
    case = make_case([(1, 5), (3, 70)], block_size=32, dtype=dtype)
    expected = attention.paged_attention(case.query, case.cache, case.batch, scale=0.1)
    keys, values = reference.cache_views(case.cache, 64, 64)
    first, last = int(case.batch.block_tables[0, 0]), int(case.batch.block_tables[1, 2])
    for part in (keys, values):
        part[first, :, 5:] = float("nan")
        part[last, :, 6:] = float("nan")
    assert torch.equal(attention.paged_attention(case.query, case.cache, case.batch, scale=0.1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [8, 32, 12])
def test_kv_lands_in_its_slots(dtype: torch.dtype, block_size: int) -> None:
    plain = torch.zeros(5, 3, block_size * (10 + 6), dtype=dtype)
    fast = plain.clone()
    # strided, as they come out of a joint product and a transposition
    joint = torch.randn(7, 3, 20).to(dtype)
    key, value = joint[:, :, 2:12], joint[:, :, 14:]
    slots = torch.randperm(5 * block_size)[:7]
    reference.write_kv(plain, key, value, slots)
    attention.write_kv(fast, key, value, slots)
    assert torch.equal(plain, fast)
    keys, values = reference.cache_views(fast, 10, 6)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(keys[slot // block_size, :, slot % block_size], key[token])
        assert torch.equal(values[slot // block_size, :, slot % block_size], value[token])


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_heads_that_cannot_share_kv_are_an_error(heads: int) -> None:
    """A division by zero in the kernel would end the process."""
    case = make_case([(3, 9)], heads=heads)
    with pytest.raises(ValueError, match=f"{heads} query heads cannot share 2 KV heads evenly"):
        attention.paged_attention(case.query, case.cache, case.batch, scale=0.1)


def test_what_the_kernel_does_not_take_goes_the_plain_way() -> None:
    for options in ({"dtype": torch.float16}, {"key_dim": 320, "value_dim": 320}, {"block_size": 12}):
        case = make_case([(3, 30), (1, 9)], **options)
        found = attention.paged_attention(case.query, case.cache, case.batch, scale=0.1)
        expected = reference.paged_attention(
            case.query.float(), case.cache.float(), case.batch, value_dim=case.value_dim, scale=0.1
        )
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@each_setting
@pytest.mark.parametrize("attend", ["kernel", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_a_sequences_end_may_be_anything(
    attend: str, dtype: torch.dtype, setting: dict[str, Any]
) -> None:
    case = make_case(MIXED, block_size=8, dtype=dtype)
    settings = call_settings(setting, case)
    spoilt = case.cache.clone()
    used = {
        (block, offset)
        for table, context in zip(case.batch.block_tables.tolist(), case.batch.context_lens.tolist(), strict=True)
        for position in range(context)
        for block, offset in [(table[position // 8], position % 8)]
    }
    for part in reference.cache_views(spoilt, case.query.shape[2], case.value_dim):
        for block, offset in itertools.product(range(len(spoilt)), range(8)):
            if (block, offset) not in used:
                part[block, :, offset] = float("nan")
    results = [
        attention.paged_attention(case.query, cache, case.batch, **settings)
        if attend == "kernel"
        else reference.paged_attention(case.query, cache, case.batch, value_dim=case.value_dim, **settings)
        for cache in (case.cache, spoilt)
    ]
    assert torch.equal(*results)


CHUNKS = [[1] * 300, [300], [150, 150], [7, 1, 1, 40, 128, 3, 120], [33, 1] * 8 + [28]]
WIDE: list[dict[str, Any]] = [
    {"heads": 6, "kv_heads": 2},
    {"heads": 8, "kv_heads": 8, "key_dim": 80, "value_dim": 48},
    {"heads": 16, "kv_heads": 1, "block_size": 32},
    {"heads": 4, "kv_heads": 2, "key_dim": 192, "value_dim": 128, "block_size": 8},
]


def in_chunks(case: Case, chunks: list[int], **settings: Any) -> Tensor:
    """The rows of a case of one sequence, its query cut into chunks, each with its part of the context."""
    rows, start, before = [], 0, int(case.batch.host_contexts[0]) - case.batch.num_tokens
    table = [case.batch.block_tables[0].tolist()]
    for length in chunks:
        end = start + length
        batch = AttentionBatch.build([length], [before + end], table, block_size=case.batch.block_size)
        rows.append(attention.paged_attention(case.query[start:end], case.cache, batch, **settings))
        start = end
    return torch.cat(rows)


@needs_native
@each_setting
@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_chunk(dtype: torch.dtype, shape: dict[str, Any], setting: dict[str, Any]) -> None:
    case = make_case([(300, 417)], dtype=dtype, **shape)
    settings = call_settings(setting | ({"window": 130} if setting["window"] == 25 else {}), case)
    whole = attention.paged_attention(case.query, case.cache, case.batch, **settings)
    for chunks in CHUNKS:
        assert torch.equal(in_chunks(case, chunks, **settings), whole), chunks


@needs_native
@each_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_does_not_depend_on_those_beside_it(dtype: torch.dtype, setting: dict[str, Any]) -> None:
    lens = [(1, 400), (1, 1), (17, 290), (1, 129), (200, 200), (1, 128)]
    case = make_case(lens, dtype=dtype)
    settings = call_settings(setting, case)
    whole = attention.paged_attention(case.query, case.cache, case.batch, **settings)
    starts = case.batch.query_starts.tolist()
    for some in ([0], [4], [5, 2], [3, 1, 0], [4, 4]):
        tables = [case.batch.block_tables[index].tolist() for index in some]
        batch = AttentionBatch.build([lens[i][0] for i in some], [lens[i][1] for i in some], tables, block_size=16)
        rows = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in some])
        found = attention.paged_attention(case.query[rows], case.cache, batch, **settings)
        assert torch.equal(found, whole[rows]), some
