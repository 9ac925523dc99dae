"""KV with a checkable origin: each token's KV is a number that depends on all tokens before it, and the sampled token
depends on all of the KV that attention would read. So a wrong block, in any layer, gives a wrong token, and the right
tokens can be computed from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvferry.core.blocks.layout import KVLayout
from kvferry.store.codecs.none import NoCodec
from kvferry.store.record import RecordFormat

Numbers = NDArray[np.uint64]
_MASK = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 2**64)
_ROOT = 0x243F6A8885A308D3
_CHUNK = 4096


def mixed(number: int) -> int:
    """SplitMix64's last step."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def mixed_tokens(tokens: Sequence[int] | Numbers) -> Numbers:
    """`mixed` of each number plus a constant."""
    numbers = np.asarray(tokens, dtype=np.uint64) + np.uint64(_FACTOR)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = numbers ^ (numbers >> np.uint64(31))
    return mixed


@cache
def _powers(base: int) -> Numbers:
    """`base` to the powers 1, 2, … modulo 2^64."""
    powers, power = np.empty(_CHUNK, dtype=np.uint64), 1
    for index in range(_CHUNK):
        power = power * base & _MASK
        powers[index] = power
    return powers


def chain(before: int, tokens: Sequence[int]) -> Numbers:
    """The KV of tokens that follow a token with the KV `before`: h = (h of the token before + its own) * factor."""
    arrays = []
    for start in range(0, len(tokens), _CHUNK):
        part = mixed_tokens(tokens[start : start + _CHUNK])
        number = len(part)
        # h_n = f^n h_0 + Σ f^(n-j+1) c_j, so h_n / f^n is a running sum.
        sums = np.cumsum(part * _powers(_INVERSE)[:number] * np.uint64(_FACTOR), dtype=np.uint64)
        values = (sums + np.uint64(before)) * _powers(_FACTOR)[:number]
        before = int(values[-1])
        arrays.append(values)
    return np.concatenate(arrays) if len(arrays) != 1 else arrays[0]


def follow(before: int, token: int) -> int:
    """The KV of one token that follows a token with the KV `before`: `chain` for one token, faster."""
    return (before + mixed((token + _FACTOR) & _MASK)) * _FACTOR & _MASK


@cache
def _layer_factors(num_layers: int) -> Numbers:
    """The first is 1, so that layer 0 has the chain itself."""
    return np.array([1] + [mixed(layer) | 1 for layer in range(1, num_layers)], dtype=np.uint64)


def sample(attended: int, seed: int, position: int, vocab_size: int) -> int:
    """The token at this position if attention has read KV with this sum."""
    return mixed(attended ^ mixed(seed ^ mixed(position))) % vocab_size


def expected_tokens(prompt: Sequence[int], seed: int, number: int, vocab_size: int, num_layers: int) -> list[int]:
    """The right answer to a prompt."""
    values = chain(_ROOT, prompt)
    before, total = int(values[-1]), int(values.sum(dtype=np.uint64))
    factor = int(_layer_factors(num_layers).sum(dtype=np.uint64))
    answer: list[int] = []
    for position in range(len(prompt), len(prompt) + number):
        token = sample(total * factor & _MASK, seed, position, vocab_size)
        answer.append(token)
        before = follow(before, token)
        total = (total + before) & _MASK
    return answer


def counted_token(seed: int, position: int, vocab_size: int) -> int:
    """The token at this position, independent of KV."""
    return (seed + position) % vocab_size


TOKEN_BYTES = 8
"""Bytes in the simulator of one token's KV in one layer."""


class SimLayout(KVLayout, frozen=True, kw_only=True):
    """A layout with `TOKEN_BYTES` for each token in the simulator. A block takes the space and the time of all its
    bytes (`block_bytes`), but only these few are moved and stored."""

    def span_bytes(self, layer: int) -> int:
        """Bytes that the simulator moves."""
        return TOKEN_BYTES * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of the real block."""
        return sum(super(SimLayout, self).span_bytes(layer) for layer in range(self.num_layers))

    def real(self) -> KVLayout:
        """The layout of real blocks."""
        return KVLayout(**{name: getattr(self, name) for name in KVLayout.__struct_fields__})

    def true_bytes(self) -> float:
        """Number of bytes of a real block for each byte of a stored record."""
        return self.block_bytes / RecordFormat(self, NoCodec(self)).max_record_bytes


class KVContents:
    """The content of the KV blocks of one instance: `[layers, blocks, block_size]`."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.values: Numbers = np.zeros((num_layers, num_blocks, block_size), dtype=np.uint64)
        self._factors = _layer_factors(num_layers)
        self._int_factors: list[int] = self._factors.tolist()

    def compute(self, block_ids: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Write the KV of tokens `start`, `start + 1`, … of a sequence with these blocks."""
        size = self.block_size
        before = _ROOT
        if start:
            before = int(self.values[0, block_ids[(start - 1) // size], (start - 1) % size])
        if len(tokens) == 1:
            value, slot = follow(before, tokens[0]), (block_ids[start // size], start % size)
            for layer, factor in enumerate(self._int_factors):
                self.values[layer, *slot] = value * factor & _MASK
            return
        positions = np.arange(start, start + len(tokens))
        blocks = np.asarray(block_ids, dtype=np.int64)[positions // size]
        self.values[:, blocks, positions % size] = chain(before, tokens)[None, :] * self._factors[:, None]

    def attended(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """The sum of the KV of the first `num_tokens` tokens, in all layers."""
        full, rest = divmod(num_tokens, self.block_size)
        total = int(self.values[:, np.asarray(block_ids[:full], dtype=np.int64)].sum(dtype=np.uint64)) if full else 0
        if rest:
            total += int(self.values[:, block_ids[full], :rest].sum(dtype=np.uint64))
        return total & _MASK

    def view(self, layer: int, block_id: int) -> memoryview:
        """The memory of one block of one layer, as bytes."""
        return memoryview(self.values[layer, block_id]).cast("B")

    def copy(self, layer: int, source: KVContents, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy blocks of one layer from another instance."""
        self.values[layer, target_ids] = source.values[layer, source_ids]
