"""Which instance probably has which prefixes in its KV cache.

Known from the router's own history (what it sent where), kept in the order in which an instance would evict it and
within the size of the instance's cache, and from the instances' KV events where they publish any. Owns both; everything
is bounded. Does no I/O, so a simulator can use it.
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
"""Capacity of an instance that does not tell the size of its cache."""


@dataclass
class _Cache:
    """The probable content of one instance's cache: `keys` in the order of their use, with the number of tokens of
    each.

    `named`: the keys of the blocks in its events, by the instance's own hash; `block_size`: of those blocks, 0 if it
    publishes no events.
    """

    bit: int
    keys: OrderedDict[int, float] = field(default_factory=OrderedDict)
    named: OrderedDict[Any, int] = field(default_factory=OrderedDict)
    block_size: int = 0
    num_tokens: float = 0.0
    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS


@dataclass(frozen=True)
class IndexStatistics:
    """The number of entries of all instances together, and of different entries."""

    num_entries: int
    num_keys: int


class Match(Mapping[Any, int]):
    """How many tokens of a prompt each instance probably has cached; instances that have none are left out. `groups`:
    which instances, as bits at their `places` below `num_places`, have how many; the most counts."""

    __slots__ = ("_groups", "_num_places", "_places")

    def __init__(self, groups: Sequence[tuple[int, int]], places: Mapping[Any, int], num_places: int) -> None:
        self._groups, self._places, self._num_places = groups, places, num_places

    def __getitem__(self, instance: Any) -> int:
        if not (found := self.tokens(instance)):
            raise KeyError(instance)
        return found

    def tokens(self, instance: Any) -> int:
        """How many this instance has; 0: none."""
        most = 0
        if self._groups and (place := self._places.get(instance)) is not None:
            for bits, num_tokens in self._groups:
                if num_tokens > most and bits >> place & 1:
                    most = num_tokens
        return most

    def __iter__(self) -> Iterator[Any]:
        return (one for one, place in self._places.items() if any(bits >> place & 1 for bits, _ in self._groups))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def by_place(self) -> Vector:
        """How many tokens the instance at each place has; the last place is nobody's."""
        num_bytes = self._num_places // 8 + 1
        if len(self._groups) == 1:
            [(bits, num_tokens)] = self._groups
            packed = np.frombuffer(bits.to_bytes(num_bytes, "little"), np.uint8)
            return np.unpackbits(packed, bitorder="little") * float(num_tokens)
        found: Vector = np.zeros(8 * num_bytes)
        for bits, num_tokens in self._groups:
            packed = np.frombuffer(bits.to_bytes(num_bytes, "little"), np.uint8)
            np.maximum(found, np.unpackbits(packed, bitorder="little") * float(num_tokens), out=found)
        return found


NO_MATCH = Match((), {}, 0)


class PrefixIndex:
    """Instances are any hashable objects. `max_entries` limits the whole; each instance has an equal share of it."""

    def __init__(self, max_entries: int = 400_000) -> None:
        self._max_entries = max_entries
        self._caches: dict[Any, _Cache] = {}
        self._places: dict[Any, int] = {}
        """Place of each instance's bit. Replaced, not changed, as instances come and go."""
        self._all_bits = 0
        self._holders: dict[int, int] = {}
        # What was found last, for those who ask the same again: all who look at one request do.
        self._version = 0
        self._matched: Prefix | None = None
        self._matched_version = 0
        self._found = self._tokens_of = NO_MATCH
        self._tokens = self._tokens_of.by_place()

    @property
    def wants_token_ids(self) -> bool:
        """Whether token ids of prompts are useful, because an instance publishes events about its blocks."""
        return any(cache.block_size for cache in self._caches.values())

    def match(self, prefix: Prefix) -> Match:
        """How many tokens of the prompt each instance probably has cached."""
        if prefix is self._matched and self._version == self._matched_version:
            return self._found
        groups = self._walk(prefix.keys, prefix.ends)
        if prefix.token_ids is not None:
            for size in {cache.block_size for cache in self._caches.values() if cache.block_size}:
                keys = prefix.block_keys(size)
                groups += self._walk(keys, range(size, size * len(keys) + 1, size))
        self._matched, self._matched_version = prefix, self._version
        self._found = Match(groups, self._places, self._all_bits.bit_length())
        return self._found

    def cached(self, prefix: Prefix, instances: Candidates[Any]) -> Vector:
        """How many tokens of the prompt each of these instances probably has cached."""
        match = self.match(prefix)
        known = instances.memo.get(self)
        if known is None or known[0] is not self._places:
            nowhere = self._all_bits.bit_length()
            rows = np.array([self._places.get(one, nowhere) for one in instances], np.intp)
            known = instances.memo[self] = self._places, rows
        if self._tokens_of is not match:
            self._tokens_of, self._tokens = match, match.by_place()
        found: Vector = self._tokens[known[1]]
        return found

    def served(self, instance: Any, prefix: Prefix) -> None:
        """Note that this instance is sent this prompt, and will have its KV. Its events will report that too, but
        later. The deepest parts come first in the order of eviction."""
        cache = self._caches.get(instance) or self._cache(instance)
        keys, ends = prefix.keys, prefix.ends
        if cache.block_size and prefix.token_ids is not None:
            keys = prefix.block_keys(cache.block_size)
            ends = range(cache.block_size, cache.block_size * len(keys) + 1, cache.block_size)
        known, place, version = cache.keys, len(keys), self._version
        for key in reversed(keys):
            place -= 1
            if key in known:
                known.move_to_end(key)
            else:
                self._add(cache, key, ends[place] - (ends[place - 1] if place else 0))
        if version != self._version:
            self._trim(cache)

    def stored(self, instance: Any, names: Sequence[Any], parent: Any, token_ids: Sequence[int], size: int) -> None:
        """Note an event: the instance now has these blocks of `size` tokens, which follow the block that it calls
        `parent`.

        If the parent is not known, the blocks cannot be placed and are ignored.
        """
        if size < 1:
            return
        cache = self._cache(instance)
        cache.block_size = size
        before = None if parent is None else cache.named.get(parent)
        if parent is not None and before is None:
            return
        keys = list(chain_blocks(before, token_ids, size))
        cache.named.update(zip(names, keys, strict=False))
        for key in reversed(keys):  # As in `served`: what lies deeper goes first.
            self._add(cache, key, size)
        self._trim(cache)

    def removed(self, instance: Any, names: Iterable[Any]) -> None:
        """Note an event: the instance no longer has these blocks."""
        cache = self._cache(instance)
        for name in names:
            key = cache.named.pop(name, None)
            if key is not None:
                self._drop(cache, key)

    def cleared(self, instance: Any) -> None:
        """The instance's cache is empty: it was reset, or the process is new."""
        cache = self._caches.get(instance)
        if cache is not None:
            for key in list(cache.keys):
                self._drop(cache, key)
            cache.named.clear()

    def forget(self, instance: Any) -> None:
        """Forget an instance that is no longer one of this router's."""
        self.cleared(instance)
        cache = self._caches.pop(instance, None)
        if cache is not None:
            self._all_bits ^= cache.bit
            self._places = {one: place for one, place in self._places.items() if one is not instance}
            self._version += 1

    def keep_only(self, instances: Iterable[Any]) -> None:
        """Forget all other instances."""
        for one in self._caches.keys() - set(instances):
            self.forget(one)

    def set_capacity(self, instance: Any, num_tokens: int) -> None:
        """The number of tokens that the instance's KV cache can hold."""
        cache = self._cache(instance)
        cache.capacity_tokens = num_tokens
        self._trim(cache)

    def statistics(self) -> IndexStatistics:
        """The current number of entries."""
        return IndexStatistics(sum(len(one.keys) for one in self._caches.values()), len(self._holders))

    def check(self) -> None:
        """Raise `LeakError` unless both halves agree."""
        held: dict[int, int] = {}
        for cache in self._caches.values():
            for key in cache.keys:
                held[key] = held.get(key, 0) | cache.bit
            if abs(cache.num_tokens - sum(cache.keys.values())) >= 1 + 1e-6 * cache.num_tokens:
                raise LeakError(f"{cache.num_tokens:g} tokens are counted, {sum(cache.keys.values()):g} are held")
        if held != self._holders:
            raise LeakError(f"{len(self._holders)} prefixes have holders, who have {len(held)}")

    def _walk(self, keys: Sequence[int], ends: Sequence[float]) -> list[tuple[int, int]]:
        """Follow the keys one by one until no instance is left that has them: which instances, as bits, have how many
        tokens."""
        holders, left, reached = self._holders, self._all_bits, 0.0
        found: list[tuple[int, int]] = []
        for key, end in zip(keys, ends, strict=True):
            still = holders.get(key, 0) & left
            if still != left:
                if reached:
                    found.append((left ^ still, int(reached)))
                left = still
                if not left:
                    return found
            reached = end
        if reached:
            found.append((left, int(reached)))
        return found

    def _cache(self, instance: Any) -> _Cache:
        cache = self._caches.get(instance)
        if cache is None:
            bit = ~self._all_bits & (self._all_bits + 1)
            cache = self._caches[instance] = _Cache(bit)
            self._places = {**self._places, instance: bit.bit_length() - 1}
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
        most = max(1, self._max_entries // len(self._caches))
        while cache.keys and (len(cache.keys) > most or cache.num_tokens > cache.capacity_tokens):
            self._drop(cache, next(iter(cache.keys)))
        while len(cache.named) > most:
            cache.named.popitem(last=False)
