"""Verifies at start that paged attention reproduces the model's own logits.

A few short sequences are computed as the engine computes them: in one batch, in chunks across block boundaries, one
with another's blocks as its cached prefix, and the last token by itself. The model computes each of them alone, in one
pass and with its own cache. Position ids cover large positions: a sequence of a few tokens is placed across each length
that the configuration names (the trained context, the last position, …), so that one batch has sequences on both sides
of it. Windows are made small for a second pass, since reaching a real one would take thousands of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import UnsupportedModel
from kvferry.core.settings import environment
from kvferry.engine.model.attention import PagedContext, ProbedLayers, attention_context, implementation, probe_layers
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.ops.batch import AttentionBatch
from kvferry.engine.patch_names import FLAG

NUM_TOKENS = 24
BLOCK_SIZE = 8
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
CHUNK_BOUNDARIES = (0, 16, 23, NUM_TOKENS)
"""The boundaries of a sequence's chunks: two chunks, then one token. The first chunk is the prefix that two sequences
share."""
SMALL_WINDOW = 5
# Distances are relative to the spread of the logits. Rounding stays far below these tolerances; a wrong mask or
# position gives a distance of about 1. Where rounding is amplified (a close choice of experts), transformers' own two
# attention functions differ by about as much as paged attention does.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
ROUNDING_MARGIN = 3.0
"""A distance is also accepted if it is at most this many times a distance that is known to be rounding."""
DISTANCE_QUANTILE = 0.7
"""In half precision, the distance of logits is this quantile of the distances of their tokens."""
PATCHED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""As TOLERANCE, between the loaded model and the patched one."""
_LENGTHS = ("position", "window", "context", "chunk", "floor_scale", "max_seq", "max_length")
"""Parts of the names of settings for lengths beyond which a model may compute differently."""


@dataclass(frozen=True)
class Example:
    """NUM_TOKENS token ids, the position of the first one, and the block table. `reads_prefix`: the blocks of the first
    chunk are those that another example writes."""

    ids: Tensor
    first: int
    table: list[int]
    reads_prefix: bool = False

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + NUM_TOKENS


class SelfCheck:
    """Compares the logits through the engine's paged attention with the logits through the model's own.
    `trained_context`: the result of `rope.trained_context`. All ranks call the methods together. Both methods raise
    `UnsupportedModel` if the logits differ by more than rounding."""

    def __init__(self, model: Any, probed: ProbedLayers, device: torch.device, trained_context: int | None) -> None:
        self._model, self._probed, self._device, self._trained_context = model, probed, device, trained_context
        self._examples = _examples(model.config.get_text_config(), device)
        self._expected: list[Tensor] = []
        self._rounding = 0.0
        """The largest distance that was accepted for an example of the loaded model."""

    @torch.inference_mode()
    def run(self) -> None:
        """Check the model as it was loaded."""
        model, probed, text = self._model, self._probed, self._model.config.get_text_config()
        self._expected, self._rounding = _compare(model, probed, self._examples, self._trained_context)
        with _small_windows(text) as are_smaller:
            if are_smaller or any(window is not None and window > NUM_TOKENS for window in probed.windows):
                shrunk = probe_layers(model, self._device, RankPlacement())
                _require_same_windows(model, probed, shrunk)
                _compare(model, ProbedLayers(probed.layouts, shrunk.windows), self._examples[:2], self._trained_context)

    @torch.inference_mode()
    def run_patched(self) -> None:
        """Compare the patched model with the logits before patching. A distance is accepted up to PATCHED_TOLERANCE, or
        up to ROUNDING_MARGIN times the largest distance that `run` accepted."""
        paged_logits = _paged_logits(self._model, self._probed, self._examples, self._trained_context)
        for example, paged, expected in zip(self._examples, paged_logits, self._expected, strict=True):
            distance = _distance(paged, expected[-len(paged) :])
            allowed = max(PATCHED_TOLERANCE[expected.dtype], ROUNDING_MARGIN * self._rounding)
            if not distance <= allowed:
                raise UnsupportedModel(
                    f"{type(self._model).__name__} does not give the same logits when it is patched, at positions"
                    f" {example.first} to {example.end - 1} (they are {distance:.2g} of their spread apart,"
                    f" {allowed:.2g} could be rounding); start with {environment.NATIVE}=0, or without a {FLAG}"
                )


def thresholds(text: Any, max_lengths: int = 32) -> list[int]:
    """The lengths in a configuration at which a model may begin to compute differently, ascending: the last position,
    and the smallest `max_lengths` of the others."""
    last = text.max_position_embeddings
    lengths = {
        value
        for name, value in _numbers(text.to_dict())
        if any(part in name for part in _LENGTHS) and NUM_TOKENS < value <= last
    }
    return sorted({*sorted(lengths)[:max_lengths], last})


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, int | float) and not isinstance(item, bool) and float(item).is_integer():
                yield str(name), int(item)


def _examples(text: Any, device: torch.device) -> list[Example]:
    """Two examples that begin at the first position and share a prefix. For each threshold, one example that ends at it
    and one that crosses it."""
    generator = torch.Generator().manual_seed(0)
    last = text.max_position_embeddings
    starts = {
        start for threshold in thresholds(text) for start in (threshold - NUM_TOKENS, threshold - NUM_TOKENS // 2)
    }
    far = sorted(start for start in starts if 0 < start <= last - NUM_TOKENS)
    draw = lambda: torch.randint(0, text.vocab_size, (NUM_TOKENS,), generator=generator).to(device)  # noqa: E731
    trunk, other = draw(), draw()
    other[: CHUNK_BOUNDARIES[1]] = trunk[: CHUNK_BOUNDARIES[1]]
    num_shared = CHUNK_BOUNDARIES[1] // BLOCK_SIZE
    tables = [list(range(row * NUM_BLOCKS, (row + 1) * NUM_BLOCKS)) for row in range(len(far) + 2)]
    branch = Example(other, 0, tables[0][:num_shared] + tables[1][num_shared:], reads_prefix=True)
    return [Example(trunk, 0, tables[0]), branch] + [
        Example(draw(), start, table) for start, table in zip(far, tables[2:], strict=True)
    ]


def _compare(
    model: Any, probed: ProbedLayers, examples: list[Example], trained_context: int | None
) -> tuple[list[Tensor], float]:
    """Compare paged attention with the model's own. Returns the logits [T, vocab] that the model computes for each
    example alone, and the largest distance from them."""
    expected = [_logits(model, example, "eager") for example in examples]
    rounding = _require_consistent(model, examples, expected, trained_context)
    paged_logits, largest = _paged_logits(model, probed, examples, trained_context), 0.0
    for example, paged, own_logits in zip(examples, paged_logits, expected, strict=True):
        distance, allowed = _distance_and_tolerance(model, example, paged, own_logits, rounding)
        if not distance <= allowed:
            raise UnsupportedModel(_mismatch_message(model, example, paged, own_logits, distance, allowed))
        largest = max(largest, distance)
    return expected, largest


def _require_consistent(
    model: Any, examples: list[Example], expected: list[Tensor], trained_context: int | None
) -> float:
    """Raise `UnsupportedModel` if the model's logits with its own cache differ from `expected`, without cache: then
    there is no right answer to reproduce. Returns the largest distance."""
    pairs, largest = list(zip(examples, expected, strict=True)), 0.0
    if trained_context is None:
        sides = [pairs]
    else:  # Across the limit of longrope, a model's own cache keeps keys of both kinds: see `rope`.
        sides = [
            [pair for pair in pairs if pair[0].end <= trained_context],
            [pair for pair in pairs if pair[0].first >= trained_context],
        ]
    for side in filter(None, sides):
        with _own_cache_errors(model):
            cached = _cached_logits(model, [example for example, _ in side])
        for (example, without_cache), with_cache in zip(side, cached, strict=False):
            if not bool(without_cache.isfinite().all()):
                continue
            distance, allowed = _distance_and_tolerance(model, example, with_cache, without_cache)
            if not distance <= allowed:
                raise UnsupportedModel(
                    f"{type(model).__name__} computes other logits with its own cache than without ({distance:.2g} of"
                    " their spread apart), so no answer of it is the right one"
                )
            largest = max(largest, distance)
    return largest


@contextmanager
def _own_cache_errors(model: Any) -> Iterator[None]:
    """Raise errors of the body, which uses transformers' own cache, as `UnsupportedModel`: they do not come from
    kvferry's cache."""
    try:
        yield
    except Exception as error:  # whatever a model's code raises
        raise UnsupportedModel(
            f"{type(model).__name__} fails with transformers' own cache, with which kvferry's is compared"
            f" ({type(error).__name__}: {error})"
        ) from error


def _distance_and_tolerance(
    model: Any, example: Example, actual: Tensor, expected: Tensor, rounding: float = 0.0
) -> tuple[float, float]:
    """The distance of logits [T, vocab] from the last T of the expected ones, and the maximum distance that could be
    rounding. `rounding`: a distance that is known to be rounding."""
    distance, allowed = _distance(actual, expected[-len(actual) :]), TOLERANCE[expected.dtype]
    if not distance <= allowed:
        allowed = max(allowed, ROUNDING_MARGIN * max(rounding, _rounding(model, example, expected)))
    return distance, allowed


def _mismatch_message(
    model: Any, example: Example, actual: Tensor, expected: Tensor, distance: float, allowed: float
) -> str:
    name = type(model).__name__
    if not bool(expected.isfinite().all()):
        return f"{name} computes logits that are not finite, by its own attention too; its weights look damaged"
    return (
        f"{name} does not give the same logits through paged attention as through its own, at positions"
        f" {example.first} to {example.end - 1} (they are {distance:.2g} of their spread apart, {allowed:.2g} could be"
        " rounding); it would answer wrongly"
    )


def _logits(model: Any, example: Example, name: str) -> Tensor:
    """Logits [T, vocab] of one sequence alone, by one of transformers' own attention functions. Raises `ValueError` if
    the model does not have it."""
    positions = torch.arange(example.first, example.end, device=example.ids.device)
    with implementation(model, name):
        logits: Tensor = model(input_ids=example.ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits


def _cached_logits(model: Any, examples: list[Example]) -> list[Tensor]:
    """Logits [T, vocab] of each example with the model's own cache, in chunks. Empty if the model has no cache."""
    ids = torch.stack([example.ids for example in examples])
    positions = torch.stack([torch.arange(example.first, example.end, device=ids.device) for example in examples])
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # as it was called before transformers 5.24
    cache, logits = None, []
    with implementation(model, "eager"):
        for start, end in pairwise(CHUNK_BOUNDARIES):
            chunk = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end]}
            output = model(**chunk, **{name: cache}, use_cache=True)
            cache = getattr(output, name, None)
            if cache is None:
                return []
            logits.append(output.logits)
    return list(torch.cat(logits, dim=1))


def _rounding(model: Any, example: Example, expected: Tensor) -> float:
    """The distance between two of transformers' own attention functions; 0 if the model has only one."""
    try:
        return _distance(_logits(model, example, "sdpa"), expected)
    except ValueError:
        return 0.0


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The distance between logits [T, vocab], relative to the spread of the expected ones.

    In half precision, rounding may send a few tokens to another expert. So the distance is then a quantile of the
    distances of the tokens: a wrong mask or position affects at least half of them.
    """
    spread = (expected - expected.mean()).double().norm(dim=-1).square().mean().sqrt().clamp(min=1e-12)
    distances = (actual - expected).double().norm(dim=-1) / spread
    if expected.dtype == torch.float32:
        return float(distances.square().mean().sqrt())
    return float(distances.quantile(DISTANCE_QUANTILE))


def _paged_logits(
    model: Any, probed: ProbedLayers, examples: list[Example], trained_context: int | None
) -> list[Tensor]:
    """Logits of each example, computed in one batch: [T, vocab], without the tokens whose blocks are another's."""
    caches = _caches(model, probed, NUM_BLOCKS * len(examples), examples[0].ids.device)
    logits: list[list[Tensor]] = [[] for _ in examples]
    for start, end in pairwise(CHUNK_BOUNDARIES):
        rows = [row for row, example in enumerate(examples) if start > 0 or not example.reads_prefix]
        outputs = _step(model, probed, caches, [examples[row] for row in rows], start, end, trained_context)
        for row, output in zip(rows, outputs.split(end - start), strict=True):
            logits[row].append(output)
    return [torch.cat(parts) for parts in logits]


def _step(
    model: Any,
    probed: ProbedLayers,
    caches: list[Tensor],
    examples: list[Example],
    start: int,
    end: int,
    trained_context: int | None,
) -> Tensor:
    """Tokens `start` to `end` of each example in one forward pass: their logits, concatenated."""
    device, count = examples[0].ids.device, len(examples)
    batch = AttentionBatch.build(
        [end - start] * count,
        [end] * count,
        [example.table for example in examples],
        block_size=BLOCK_SIZE,
        device=device,
    )
    first = torch.tensor([example.first for example in examples], device=device)
    long = None if trained_context is None else (first + NUM_TOKENS > trained_context).repeat_interleave(end - start)
    with attention_context(PagedContext(batch, caches, probed.windows, long)):
        output = model(
            input_ids=torch.cat([example.ids[start:end] for example in examples])[None],
            position_ids=(batch.positions + first.repeat_interleave(end - start))[None],
            use_cache=False,
        )
    logits: Tensor = output.logits[0]
    return logits


def _caches(model: Any, probed: ProbedLayers, num_blocks: int, device: torch.device) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    spans = [BLOCK_SIZE * (layout.key_dim + layout.value_dim) for layout in probed.layouts]
    return [
        torch.zeros(num_blocks, layout.num_kv_heads, span, dtype=dtype, device=device)
        for layout, span in zip(probed.layouts, spans, strict=True)
    ]


# Windows made small.

_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings by which transformers' masks and caches choose a layer's window."""


@contextmanager
def _small_windows(text: Any) -> Iterator[bool]:
    """Set the configuration's windows to SMALL_WINDOW while the body runs, except windows as long as the context.
    Yields True if there are any."""
    before = {name: getattr(text, name, None) for name in _WINDOWS}
    last = text.max_position_embeddings
    windows = {name: value for name, value in before.items() if isinstance(value, int) and value < last}
    try:
        for name in windows:
            setattr(text, name, SMALL_WINDOW)
        yield bool(windows)
    finally:
        for name, value in windows.items():
            setattr(text, name, value)


def _require_same_windows(model: Any, probed: ProbedLayers, shrunk: ProbedLayers) -> None:
    """Raise `UnsupportedModel` unless the same layers have a window, now the small one."""
    expected = tuple(None if window is None else SMALL_WINDOW for window in probed.windows)
    if shrunk.windows != expected:
        raise UnsupportedModel(
            f"{type(model).__name__} has windows {_distinct(probed.windows)} that do not follow its configuration"
            f" ({_distinct(shrunk.windows)} with sliding_window {SMALL_WINDOW}), so they cannot be checked"
        )


def _distinct(windows: tuple[int | None, ...]) -> list[int | None]:
    return list(dict.fromkeys(windows))
