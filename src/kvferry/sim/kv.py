"""KV that shows where it came from: each token's KV is a number that depends on all tokens before it, and the token
that is sampled depends on all of the KV that attention would read. So a block that is wrong, in any layer, gives a
wrong token, and what the right ones are can be computed from the prompt alone.
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
_AT_ONCE = 4096


def mixed(number: int) -> int:
    """SplitMix64's last step."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def mixed_tokens(tokens: Sequence[int] | Numbers) -> Numbers:
    """`mixed`, of each of these after a constant is added."""
    found = np.asarray(tokens, dtype=np.uint64) + np.uint64(_FACTOR)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = found ^ (found >> np.uint64(31))
    return mixed


@cache
def _powers(base: int) -> Numbers:
    """`base` to the powers 1, 2, … modulo 2^64."""
    found, power = np.empty(_AT_ONCE, dtype=np.uint64), 1
    for place in range(_AT_ONCE):
        power = power * base & _MASK
        found[place] = power
    return found


def chain(before: int, tokens: Sequence[int]) -> Numbers:
    """The KV of tokens that follow a token with the KV `before`: h = (h of the token before + its own) * factor."""
    pieces = []
    for start in range(0, len(tokens), _AT_ONCE):
        part = mixed_tokens(tokens[start : start + _AT_ONCE])
        number = len(part)
        # h_n = f^n h_0 + Σ f^(n-j+1) c_j, so h_n / f^n is a running sum.
        sums = np.cumsum(part * _powers(_INVERSE)[:number] * np.uint64(_FACTOR), dtype=np.uint64)
        values = (sums + np.uint64(before)) * _powers(_FACTOR)[:number]
        before = int(values[-1])
        pieces.append(values)
    return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]


def follow(before: int, token: int) -> int:
    """The KV of one token that follows a token with the KV `before`: as `chain`, with less around it."""
    return (before + mixed((token + _FACTOR) & _MASK)) * _FACTOR & _MASK


@cache
def _layer_factors(num_layers: int) -> Numbers:
    """The first is 1, so that layer 0 has the chain itself."""
    return np.array([1] + [mixed(layer) | 1 for layer in range(1, num_layers)], dtype=np.uint64)


def sample(attended: int, seed: int, position: int, vocab_size: int) -> int:
    """The token at this position, where attention has read KV with this sum."""
    return mixed(attended ^ mixed(seed ^ mixed(position))) % vocab_size


def right_tokens(prompt: Sequence[int], seed: int, number: int, vocab_size: int, num_layers: int) -> list[int]:
    """The answer to a prompt."""
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
    """The token at this position where no KV is looked at."""
    return (seed + position) % vocab_size


TOKEN_BYTES = 8
"""What the simulator has of one token's KV in one layer."""


class SimLayout(KVLayout, frozen=True, kw_only=True):
    """A layout of whose spans the simulator has `TOKEN_BYTES` for each token. A block takes the room and the time of
    all its bytes (`block_bytes`); only these few are moved and kept."""

    def span_bytes(self, layer: int) -> int:
        """Bytes that are moved."""
        return TOKEN_BYTES * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of the real block."""
        return sum(super(SimLayout, self).span_bytes(layer) for layer in range(self.num_layers))

    def real(self) -> KVLayout:
        """The layout of real blocks."""
        return KVLayout(**{name: getattr(self, name) for name in KVLayout.__struct_fields__})

    def true_bytes(self) -> float:
        """How many bytes of a real block one byte of a stored record stands for."""
        return self.block_bytes / RecordFormat(self, NoCodec(self)).max_record_bytes


class KVContents:
    """What is in the KV blocks of one instance: `[layers, blocks, block_size]`."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.values: Numbers = np.zeros((num_layers, num_blocks, block_size), dtype=np.uint64)
        self._factors = _layer_factors(num_layers)
        self._whole_factors: list[int] = self._factors.tolist()

    def compute(self, block_ids: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Write the KV of tokens `start`, `start + 1`, … of a sequence with these blocks."""
        size = self.block_size
        before = _ROOT
        if start:
            before = int(self.values[0, block_ids[(start - 1) // size], (start - 1) % size])
        if len(tokens) == 1:
            value, place = follow(before, tokens[0]), (block_ids[start // size], start % size)
            for layer, factor in enumerate(self._whole_factors):
                self.values[layer, *place] = value * factor & _MASK
            return
        places = np.arange(start, start + len(tokens))
        blocks = np.asarray(block_ids, dtype=np.int64)[places // size]
        self.values[:, blocks, places % size] = chain(before, tokens)[None, :] * self._factors[:, None]

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

    def copy(self, layer: int, source: KVContents, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy blocks of one layer from another instance."""
        self.values[layer, ours] = source.values[layer, theirs]
