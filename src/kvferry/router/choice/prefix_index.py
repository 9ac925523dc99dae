"""Index of the prefixes that each instance probably has in its KV cache.

Its sources are the prompts that the router has sent to the instance and, if the instance publishes them, its KV events.
Entries are in the order of eviction and within the size of the instance's cache. Everything is bounded. Does no I/O, so
a simulator can use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.core.errors import LeakError
from kvferry.router.choice.prompt import Prefix, chain_blocks
from kvferry.router.instances.load import Candidates, Vector

DEFAULT_CAPACITY_TOKENS = 1_000_000
"""Capacity of an instance that does not report the size of its cache."""


@dataclass
class _Cache:
    """The probable content of an instance's cache: `keys`, least recently used first, with the number of tokens of
    each.

    `keys_by_hash`: the keys of the blocks in its events, by the instance's own block hash; `block_size`: tokens of such
    a block, 0 if it publishes no events.
    """

    bit: int
    keys: OrderedDict[int, float] = field(default_factory=OrderedDict)
    keys_by_hash: OrderedDict[Any, int] = field(default_factory=OrderedDict)
    block_size: int = 0
    num_tokens: float = 0.0
    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS


@dataclass(frozen=True)
class IndexStatistics:
    """The number of entries of all instances together, and of different entries."""

    num_entries: int
    num_keys: int


class Match(Mapping[Any, int]):
    """Cached tokens of a prompt by instance; instances without any are left out. `groups`: pairs of a bit
    mask of instances and a number of tokens; for an instance in several groups the largest number counts. Bits are the
    instances' `positions`, below `num_positions`."""

    __slots__ = ("_groups", "_num_positions", "_positions")

    def __init__(self, groups: Sequence[tuple[int, int]], positions: Mapping[Any, int], num_positions: int) -> None:
        self._groups, self._positions, self._num_positions = groups, positions, num_positions

    def __getitem__(self, instance: Any) -> int:
        if not (num_tokens := self.tokens(instance)):
            raise KeyError(instance)
        return num_tokens

    def tokens(self, instance: Any) -> int:
        """Number of tokens that this instance has cached."""
        longest = 0
        if self._groups and (position := self._positions.get(instance)) is not None:
            for bits, num_tokens in self._groups:
                if num_tokens > longest and bits >> position & 1:
                    longest = num_tokens
        return longest

    def __iter__(self) -> Iterator[Any]:
        return (
            instance
            for instance, position in self._positions.items()
            if any(bits >> position & 1 for bits, _ in self._groups)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def to_vector(self) -> Vector:
        """Number of cached tokens by the instance's position. Values from `num_positions` on belong to no instance."""
        num_bytes = self._num_positions // 8 + 1
        if len(self._groups) == 1:
            [(bits, num_tokens)] = self._groups
            packed = np.frombuffer(bits.to_bytes(num_bytes, "little"), np.uint8)
            return np.unpackbits(packed, bitorder="little") * float(num_tokens)
        vector: Vector = np.zeros(8 * num_bytes)
        for bits, num_tokens in self._groups:
            packed = np.frombuffer(bits.to_bytes(num_bytes, "little"), np.uint8)
            np.maximum(vector, np.unpackbits(packed, bitorder="little") * float(num_tokens), out=vector)
        return vector


NO_MATCH = Match((), {}, 0)


class PrefixIndex:
    """Instances are any hashable objects. `max_entries`: maximum number of entries of all instances; each instance may
    have an equal share of it."""

    def __init__(self, max_entries: int = 400_000) -> None:
        self._max_entries = max_entries
        self._caches: dict[Any, _Cache] = {}
        self._positions: dict[Any, int] = {}
        """Position of each instance's bit. Replaced, not changed, as instances join and leave."""
        self._all_bits = 0
        """The bits of all instances."""
        self._holders: dict[int, int] = {}
        """For each key, the bit mask of the instances that have its tokens."""
        # the last match, because several callers look up the same request
        self._version = 0
        self._last_prefix: Prefix | None = None
        self._last_version = 0
        self._last_match = self._vector_match = NO_MATCH
        self._vector = self._vector_match.to_vector()

    @property
    def wants_token_ids(self) -> bool:
        """True if token ids of prompts are useful, because an instance publishes events about its blocks."""
        return any(cache.block_size for cache in self._caches.values())

    def match(self, prefix: Prefix) -> Match:
        """Cached tokens of the prompt by instance, as far as the router knows."""
        if prefix is self._last_prefix and self._version == self._last_version:
            return self._last_match
        groups = self._longest_prefixes(prefix.keys, prefix.ends)
        if prefix.token_ids is not None:
            for size in {cache.block_size for cache in self._caches.values() if cache.block_size}:
                keys = prefix.block_keys(size)
                groups += self._longest_prefixes(keys, range(size, size * len(keys) + 1, size))
        self._last_prefix, self._last_version = prefix, self._version
        self._last_match = Match(groups, self._positions, self._all_bits.bit_length())
        return self._last_match

    def cached(self, prefix: Prefix, instances: Candidates[Any]) -> Vector:
        """Cached tokens of the prompt on each of these instances, as far as the router knows."""
        match = self.match(prefix)
        cached = instances.memo.get(self)
        if cached is None or cached[0] is not self._positions:
            no_position = self._all_bits.bit_length()
            rows = np.array([self._positions.get(instance, no_position) for instance in instances], np.intp)
            cached = instances.memo[self] = self._positions, rows
        if self._vector_match is not match:
            self._vector_match, self._vector = match, match.to_vector()
        num_tokens: Vector = self._vector[cached[1]]
        return num_tokens

    def record_sent(self, instance: Any, prefix: Prefix) -> None:
        """Record that this prompt is sent to this instance, which will have its KV. The instance's events report this
        only later. The deepest parts are evicted first."""
        cache = self._caches.get(instance) or self._get_cache(instance)
        keys, ends = prefix.keys, prefix.ends
        if cache.block_size and prefix.token_ids is not None:
            keys = prefix.block_keys(cache.block_size)
            ends = range(cache.block_size, cache.block_size * len(keys) + 1, cache.block_size)
        cached_keys, index, version = cache.keys, len(keys), self._version
        for key in reversed(keys):
            index -= 1
            if key in cached_keys:
                cached_keys.move_to_end(key)
            else:
                self._add(cache, key, ends[index] - (ends[index - 1] if index else 0))
        if version != self._version:
            self._trim(cache)

    def record_stored(
        self, instance: Any, block_hashes: Sequence[Any], parent: Any, token_ids: Sequence[int], size: int
    ) -> None:
        """Apply an event: the instance has stored these blocks of `size` tokens, which follow the block `parent`.

        Blocks with an unknown parent have no prefix and are ignored.
        """
        if size < 1:
            return
        cache = self._get_cache(instance)
        cache.block_size = size
        parent_key = None if parent is None else cache.keys_by_hash.get(parent)
        if parent is not None and parent_key is None:
            return
        keys = list(chain_blocks(parent_key, token_ids, size))
        cache.keys_by_hash.update(zip(block_hashes, keys, strict=False))
        for key in reversed(keys):  # As in `record_sent`: the deepest blocks are evicted first.
            self._add(cache, key, size)
        self._trim(cache)

    def removed(self, instance: Any, block_hashes: Iterable[Any]) -> None:
        """Apply an event: the instance no longer has these blocks."""
        cache = self._get_cache(instance)
        for block_hash in block_hashes:
            key = cache.keys_by_hash.pop(block_hash, None)
            if key is not None:
                self._drop(cache, key)

    def cleared(self, instance: Any) -> None:
        """Apply an event: the instance's cache is empty, because it was reset, or the process is new."""
        cache = self._caches.get(instance)
        if cache is not None:
            for key in list(cache.keys):
                self._drop(cache, key)
            cache.keys_by_hash.clear()

    def forget(self, instance: Any) -> None:
        """Forget an instance that has left this router."""
        self.cleared(instance)
        cache = self._caches.pop(instance, None)
        if cache is not None:
            self._all_bits ^= cache.bit
            self._positions = {key: position for key, position in self._positions.items() if key is not instance}
            self._version += 1

    def keep_only(self, instances: Iterable[Any]) -> None:
        """Forget all other instances."""
        for instance in self._caches.keys() - set(instances):
            self.forget(instance)

    def set_capacity(self, instance: Any, num_tokens: int) -> None:
        """The number of tokens that the instance's KV cache can hold."""
        cache = self._get_cache(instance)
        cache.capacity_tokens = num_tokens
        self._trim(cache)

    def statistics(self) -> IndexStatistics:
        """The current number of entries."""
        return IndexStatistics(sum(len(cache.keys) for cache in self._caches.values()), len(self._holders))

    def check(self) -> None:
        """Raise `LeakError` unless the masks of the keys agree with the caches of all instances."""
        held: dict[int, int] = {}
        for cache in self._caches.values():
            for key in cache.keys:
                held[key] = held.get(key, 0) | cache.bit
            if abs(cache.num_tokens - sum(cache.keys.values())) >= 1 + 1e-6 * cache.num_tokens:
                raise LeakError(f"{cache.num_tokens:g} tokens are counted, {sum(cache.keys.values()):g} are held")
        if held != self._holders:
            raise LeakError(f"{len(self._holders)} prefixes have holders, which have {len(held)}")

    def _longest_prefixes(self, keys: Sequence[int], ends: Sequence[float]) -> list[tuple[int, int]]:
        """Follow the keys until no instance has the next one. Returns pairs of a bit mask of instances and the number
        of tokens that these instances have."""
        holders, remaining, previous_end = self._holders, self._all_bits, 0.0
        groups: list[tuple[int, int]] = []
        for key, end in zip(keys, ends, strict=True):
            holding = holders.get(key, 0) & remaining
            if holding != remaining:
                if previous_end:
                    groups.append((remaining ^ holding, int(previous_end)))
                remaining = holding
                if not remaining:
                    return groups
            previous_end = end
        if previous_end:
            groups.append((remaining, int(previous_end)))
        return groups

    def _get_cache(self, instance: Any) -> _Cache:
        cache = self._caches.get(instance)
        if cache is None:
            bit = ~self._all_bits & (self._all_bits + 1)
            cache = self._caches[instance] = _Cache(bit)
            self._positions = {**self._positions, instance: bit.bit_length() - 1}
            self._all_bits |= bit
            self._version += 1
        return cache

    def _add(self, cache: _Cache, key: int, num_tokens: float) -> None:
        if key in cache.keys:
            cache.keys.move_to_end(key)
            return
        cache.keys[key] = num_tokens
        cache.num_tokens += num_tokens
        self._holders[key] = self._holders.get(key, 0) | cache.bit
        self._version += 1

    def _drop(self, cache: _Cache, key: int) -> None:
        num_tokens = cache.keys.pop(key, None)
        if num_tokens is None:
            return
        cache.num_tokens -= num_tokens
        self._version += 1
        others = self._holders[key] & ~cache.bit
        if others:
            self._holders[key] = others
        else:
            del self._holders[key]

    def _trim(self, cache: _Cache) -> None:
        max_keys = max(1, self._max_entries // len(self._caches))
        while cache.keys and (len(cache.keys) > max_keys or cache.num_tokens > cache.capacity_tokens):
            self._drop(cache, next(iter(cache.keys)))
        while len(cache.keys_by_hash) > max_keys:
            cache.keys_by_hash.popitem(last=False)
