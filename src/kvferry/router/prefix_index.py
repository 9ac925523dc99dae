"""Which instance has which prefixes in its KV cache, as far as the router knows.

It knows from its own history (what it sent where), kept in the order in which an instance would evict it and within the
size of its cache, and from the instances' KV events where there are any. Owns both; bounded in all. Pure: an object
without I/O that a simulator can use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.errors import LeakError
from kvferry.router.prompt import Prefix, chain_blocks

DEFAULT_CAPACITY_TOKENS = 1_000_000
"""Of an instance that does not tell the size of its cache."""


@dataclass
class _Cache:
    """What one instance seems to hold: `keys` in the order of their use, with how many tokens each stands for.

    `named`: the keys of blocks that its events told of, by the instance's own hash; `block_size`: of those, 0 where it
    tells of none.
    """

    bit: int
    keys: OrderedDict[int, float] = field(default_factory=OrderedDict)
    named: OrderedDict[Any, int] = field(default_factory=OrderedDict)
    block_size: int = 0
    num_tokens: float = 0.0
    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS


@dataclass(frozen=True)
class IndexStatistics:
    """Entries of all instances, and different ones."""

    num_entries: int
    num_keys: int


class PrefixIndex:
    """Instances are any hashable objects. `max_entries` bounds the whole; each instance has an even share of it."""

    def __init__(self, max_entries: int = 400_000) -> None:
        self._max_entries = max_entries
        self._caches: dict[Any, _Cache] = {}
        self._holders: dict[int, int] = {}
        self._version = 0
        self._memo: tuple[Prefix | None, int, Mapping[Any, int]] = (None, 0, {})

    @property
    def wants_token_ids(self) -> bool:
        """Whether prompts' token ids help: some instance tells of its blocks."""
        return any(cache.block_size for cache in self._caches.values())

    def match(self, prefix: Prefix) -> Mapping[Any, int]:
        """How many tokens of the prompt each instance seems to have; those that have none are left out."""
        if self._memo[0] is prefix and self._memo[1] == self._version:
            return self._memo[2]
        found = self._walk(prefix.keys, prefix.ends)
        sizes = {cache.block_size for cache in self._caches.values() if cache.block_size}
        for size in sizes if prefix.token_ids is not None else ():
            keys = prefix.block_keys(size)
            for one, num_tokens in self._walk(keys, range(size, size * len(keys) + 1, size)).items():
                found[one] = max(found.get(one, 0), num_tokens)
        self._memo = (prefix, self._version, found)
        return found

    def served(self, instance: Any, prefix: Prefix) -> None:
        """It is sent this prompt, and will have its KV: its events will say so, but later. The deepest parts are the
        first that it would evict."""
        cache = self._cache(instance)
        keys, ends = prefix.keys, prefix.ends
        if cache.block_size and prefix.token_ids is not None:
            keys = prefix.block_keys(cache.block_size)
            ends = range(cache.block_size, cache.block_size * len(keys) + 1, cache.block_size)
        for place in range(len(keys) - 1, -1, -1):
            self._add(cache, keys[place], ends[place] - (ends[place - 1] if place else 0))
        self._trim(cache)

    def stored(self, instance: Any, names: Sequence[Any], parent: Any, token_ids: Sequence[int], size: int) -> None:
        """An event: it has these blocks of `size` tokens now, which follow the block that it calls `parent`.

        Where the parent is not known the blocks cannot be placed, and are passed over.
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
        """An event: these blocks are gone."""
        cache = self._cache(instance)
        for name in names:
            key = cache.named.pop(name, None)
            if key is not None:
                self._drop(cache, key)

    def cleared(self, instance: Any) -> None:
        """It has nothing any more: its cache was emptied, or it is another process."""
        cache = self._caches.get(instance)
        if cache is not None:
            for key in list(cache.keys):
                self._drop(cache, key)
            cache.named.clear()

    def forget(self, instance: Any) -> None:
        """It is no instance of this router any more."""
        self.cleared(instance)
        self._caches.pop(instance, None)

    def keep_only(self, instances: Iterable[Any]) -> None:
        """Forget all others."""
        for one in self._caches.keys() - set(instances):
            self.forget(one)

    def set_capacity(self, instance: Any, num_tokens: int) -> None:
        """How many tokens its KV cache takes."""
        cache = self._cache(instance)
        cache.capacity_tokens = num_tokens
        self._trim(cache)

    def statistics(self) -> IndexStatistics:
        """How much it holds."""
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

    def _walk(self, keys: Sequence[int], ends: Sequence[float]) -> dict[Any, int]:
        """Key by key, until nobody is left who has it."""
        left = {cache.bit: one for one, cache in self._caches.items()}
        mask, reached = sum(left), 0.0
        found: dict[Any, int] = {}
        for key, end in zip(keys, ends, strict=True):
            still = self._holders.get(key, 0) & mask
            if still != mask:
                found |= {left[bit]: int(reached) for bit in _bits(mask & ~still) if reached}
                mask = still
                if not mask:
                    return found
            reached = end
        return found | {left[bit]: int(reached) for bit in _bits(mask) if reached}

    def _cache(self, instance: Any) -> _Cache:
        cache = self._caches.get(instance)
        if cache is None:
            taken = sum(one.bit for one in self._caches.values())
            cache = self._caches[instance] = _Cache(bit=~taken & (taken + 1))
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


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest
