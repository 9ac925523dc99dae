"""The contract of eviction policies. In a package that provides one:

    from kvferry.testing.eviction import EvictionContract

    class TestMyPolicy(EvictionContract):
        policy = "my_package.my_module:MyPolicy"

No store is involved: `EvictionDriver` makes the calls that a store makes. Needs pytest.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any, ClassVar

import pytest

from kvferry.store.eviction.base import BlockKey, EvictionPolicy
from kvferry.store.eviction.guarded import GuardedPolicy
from kvferry.store.eviction.table import make_eviction_policy

CAPACITY = 6
PROMPTS: list[list[BlockKey]] = [
    ["system", "a1", "a2", "a3", "a4"],
    ["system", "a1", "a2", "b3"],
    ["system", "c1", "c2", "c3", "c4", "c5", "c6", "c7"],
    ["d0", "d1"],
    ["e0"],
    [],
]
KEYS = sorted({str(key) for prompt in PROMPTS for key in prompt})
WAITS_S = [0.0, 0.001, 0.5, 3.0, 60.0, 1e5, 1e12]
Event = tuple[str, Any]
"""The name of a method of `EvictionDriver`, and its argument."""


def random_events(seed: int, num_events: int = 120) -> list[Event]:
    """Events in a random order."""
    rng = random.Random(seed)

    def random_event() -> Event:
        match rng.choice(["request", "request", "finish", "wait", "key", "key"]):
            case "request":
                return "request", rng.choice(PROMPTS)
            case "finish":
                return "finish", (rng.choice(PROMPTS), rng.randrange(10**6))
            case "wait":
                return "wait", rng.choice(WAITS_S)
        return rng.choice(["pin", "unpin", "remove", "access", "evict", "insert"]), rng.choice(KEYS)

    return [random_event() for _ in range(num_events)]


class EvictionDriver:
    """A store without bytes: it has its own accounting, and never more blocks than fit."""

    def __init__(self, policy: EvictionPolicy | GuardedPolicy) -> None:
        self.policy, self.now = policy, 0.0
        self.cached: set[BlockKey] = set()
        self.pins: Counter[BlockKey] = Counter()
        self.victims: list[BlockKey | None] = []

    def run(self, events: list[Event]) -> None:
        """Apply the events. Fails when the policy's accounting differs."""
        for method, argument in events:
            getattr(self, method)(argument)
            assert set(filter(self.policy.__contains__, KEYS)) == self.cached
            assert len(self.policy) == len(self.cached) <= CAPACITY

    def request(self, prompt: list[BlockKey]) -> None:
        """Look up or add the blocks of a prompt."""
        for index, key in enumerate(prompt):
            if key in self.policy:
                self.access(key)
            else:
                self.insert(key, prompt[index - 1] if index else None)

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        """Add a block, if there is space for it."""
        if key not in self.cached and len(self.cached) == CAPACITY and self.evict() is None:
            return
        self.policy.insert(key, self.now, parent)
        self.cached.add(key)

    def access(self, key: BlockKey) -> None:
        """Use a block."""
        self.policy.access(key, self.now)

    def evict(self, _: object = None) -> BlockKey | None:
        """Evict a block: one that is not pinned, if there is one."""
        victim = self.policy.evict(self.now)
        self.victims.append(victim)
        free = {key for key in self.cached if not self.pins[key]}
        assert victim in free if free else victim is None
        self.cached.discard(victim)
        return victim

    def pin(self, key: BlockKey) -> None:
        """Pin a block."""
        self.policy.pin(key)
        self.pins[key] += key in self.cached

    def unpin(self, key: BlockKey) -> None:
        """Undo one `pin`."""
        self.policy.unpin(key, self.now)
        self.pins[key] -= self.pins[key] > 0

    def remove(self, key: BlockKey) -> None:
        """Delete a block."""
        self.policy.remove(key)
        self.cached.discard(key)
        del self.pins[key]

    def finish(self, answer: tuple[list[BlockKey], int]) -> None:
        """Record that a request has its answer."""
        self.policy.finish(answer[0], answer[1], self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class EvictionContract:
    """Set `policy` in a subclass, as in a store's URL."""

    policy: ClassVar[str]

    @pytest.fixture
    def name(self) -> str:
        """The policy's name."""
        return self.policy

    @pytest.mark.parametrize("seed", range(20))
    def test_never_too_many_never_a_pinned_one_and_the_same_again(self, name: str, seed: int) -> None:
        drivers = [EvictionDriver(make_eviction_policy(name, CAPACITY)) for _ in range(2)]
        for driver in drivers:
            driver.run(random_events(seed))
        assert drivers[0].victims == drivers[1].victims

    def test_everything_leaves_in_the_end_and_once(self, name: str) -> None:
        policy = make_eviction_policy(name, 100)
        for number in range(100):
            policy.insert(number, number / 10, number - 1 if number % 7 else None)
            policy.access(number // 2, number / 10)
        victims = {policy.evict(20.0) for _ in range(100)}
        assert victims == set(range(100))
        assert policy.evict(20.0) is None
        assert len(policy) == 0

    @pytest.mark.parametrize("capacity", [1, 2, 3, 17])
    def test_tiny_capacities(self, name: str, capacity: int) -> None:
        policy = make_eviction_policy(name, capacity)
        for number in range(500):
            key = (number * 7919) % 23
            while key not in policy and len(policy) >= capacity:
                assert policy.evict(number**0.5) is not None
            policy.insert(key, number**0.5, key - 1)
            assert len(policy) <= capacity

    def test_memory_of_the_past_is_bounded(self, name: str) -> None:
        """100,000 blocks are inserted and evicted, and the policy's memory of them stays bounded."""
        policy = make_eviction_policy(name, 8)
        for number in range(100_000):
            policy.insert(number, number * 0.01)
            if len(policy) > 8:
                policy.evict(number * 0.01)
        assert max(len(value) for value in vars(policy).values() if hasattr(value, "__len__")) < 66_000

    @pytest.mark.parametrize("used", [range(10), range(5)])
    @pytest.mark.parametrize("removed", [None, 9])
    def test_uses_without_an_eviction_take_no_memory(self, name: str, used: range, removed: int | None) -> None:
        """Memory stays bounded where others evict from the store, so that this policy never does."""
        policy = make_eviction_policy(name, 16)
        for key in range(10):
            policy.insert(key, 0.0, key - 1 if key else None)
        sizes = []
        for number in range(1, 1201):
            if removed is not None:
                policy.remove(removed)
            for key in used:
                policy.access(key, float(number))
            if number in (300, 1200):
                sizes.append(len(pickle.dumps(policy)))
        assert sizes[1] < sizes[0] * 1.01
