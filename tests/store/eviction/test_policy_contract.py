"""What every eviction policy keeps to, whatever happens in whatever order."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.store.eviction.base import EvictionPolicy, Key
from kvferry.store.eviction.guarded import GuardedPolicy
from kvferry.store.eviction.reuse import Reuse
from kvferry.store.eviction.table import POLICIES, make_eviction_policy
from support.examples import examples

CAPACITY = 6
PROMPTS = [
    ["system", "a1", "a2", "a3", "a4"],
    ["system", "a1", "a2", "b3"],
    ["system", "c1", "c2", "c3", "c4", "c5", "c6", "c7"],
    ["d0", "d1"],
    ["e0"],
    [],
]
KEYS = sorted({key for prompt in PROMPTS for key in prompt})

requests = st.tuples(st.just("request"), st.sampled_from(PROMPTS))
finishes = st.tuples(st.just("finish"), st.tuples(st.sampled_from(PROMPTS), st.integers(0, 10**6)))
on_keys = st.tuples(st.sampled_from(["pin", "unpin", "remove", "access", "evict", "insert"]), st.sampled_from(KEYS))
waits = st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.5, 3.0, 60.0, 1e5, 1e12]))
events = st.lists(requests | finishes | on_keys | waits, max_size=120)


class Driver:
    """A store without bytes: it keeps its own books, and never more than fit."""

    def __init__(self, policy: EvictionPolicy | GuardedPolicy) -> None:
        self.policy, self.now = policy, 0.0
        self.kept: set[Key] = set()
        self.pins: Counter[Key] = Counter()
        self.victims: list[Key | None] = []

    def run(self, events: list[tuple[str, object]]) -> None:
        for what, about in events:
            getattr(self, what)(about)
            assert set(filter(self.policy.__contains__, KEYS)) == self.kept
            assert len(self.policy) == len(self.kept) <= CAPACITY

    def request(self, prompt: list[Key]) -> None:
        for index, key in enumerate(prompt):
            if key in self.policy:
                self.access(key)
            else:
                self.insert(key, prompt[index - 1] if index else None)

    def insert(self, key: Key, parent: Key | None = None) -> None:
        if key not in self.kept and len(self.kept) == CAPACITY and self.evict() is None:
            return
        self.policy.insert(key, self.now, parent)
        self.kept.add(key)

    def access(self, key: Key) -> None:
        self.policy.access(key, self.now)

    def evict(self, _: object = None) -> Key | None:
        victim = self.policy.evict(self.now)
        self.victims.append(victim)
        free = {key for key in self.kept if not self.pins[key]}
        assert victim in free if free else victim is None
        self.kept.discard(victim)
        return victim

    def pin(self, key: Key) -> None:
        self.policy.pin(key)
        self.pins[key] += key in self.kept

    def unpin(self, key: Key) -> None:
        self.policy.unpin(key, self.now)
        self.pins[key] -= self.pins[key] > 0

    def remove(self, key: Key) -> None:
        self.policy.remove(key)
        self.kept.discard(key)
        del self.pins[key]

    def finish(self, about: tuple[list[Key], int]) -> None:
        self.policy.finish(about[0], about[1], self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("name", POLICIES)
@given(events=events)
@settings(max_examples=examples(150), deadline=None)
def test_never_too_many_never_a_pinned_one_and_the_same_again(name: str, events: list[tuple[str, object]]) -> None:
    drivers = [Driver(make_eviction_policy(name, CAPACITY)) for _ in range(2)]
    for driver in drivers:
        driver.run(events)
    assert drivers[0].victims == drivers[1].victims


@pytest.mark.parametrize("name", POLICIES)
def test_everything_leaves_in_the_end_and_once(name: str) -> None:
    policy = make_eviction_policy(name, 100)
    for number in range(100):
        policy.insert(number, number / 10, number - 1 if number % 7 else None)
        policy.access(number // 2, number / 10)
    assert sorted(policy.evict(20.0) for _ in range(100)) == list(range(100))
    assert policy.evict(20.0) is None
    assert len(policy) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_memory_of_the_past_is_bounded(name: str) -> None:
    policy = make_eviction_policy(name, 8)
    for number in range(100_000):
        policy.insert(number, number * 0.01)
        if len(policy) > 8:
            policy.evict(number * 0.01)
    remembered = [len(value) for value in vars(policy).values() if hasattr(value, "__len__")]
    assert max(remembered) < 66_000


def use_all(policy: EvictionPolicy, now: float) -> None:
    for key in range(10):
        policy.access(key, now)


def use_the_beginning(policy: EvictionPolicy, now: float) -> None:
    for key in range(5):
        policy.access(key, now)


def use_all_but_one_that_went(policy: EvictionPolicy, now: float) -> None:
    policy.remove(9)
    use_all(policy, now)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("use", [use_all, use_the_beginning, use_all_but_one_that_went])
def test_uses_without_an_eviction_take_no_memory(name: str, use: Callable[[EvictionPolicy, float], None]) -> None:
    """As of who only looks on while others evict."""
    policy = make_eviction_policy(name, 16)
    for key in range(10):
        policy.insert(key, 0.0, key - 1 if key else None)
    sizes = []
    for number in range(1, 1201):
        use(policy, float(number))
        if number in (300, 1200):
            sizes.append(len(pickle.dumps(policy)))
    assert sizes[1] < sizes[0] * 1.01


@pytest.mark.parametrize("unpinned", [range(10), reversed(range(10)), [3, 9, 0, 7, 1, 8, 2, 6, 4, 5]])
def test_reuse_gives_a_run_up_from_its_end_also_after_it_was_pinned(unpinned: list[int]) -> None:
    policy = make_eviction_policy("reuse", 16)
    for key in range(10):
        policy.insert(key, 0.0, key - 1 if key else None)
        policy.pin(key)
    assert policy.evict(1.0) is None
    for key in unpinned:
        policy.unpin(key, 2.0)
    assert [policy.evict(3.0) for _ in range(10)] == list(reversed(range(10)))


class Mistaken(Reuse):
    """Does as `reuse` does, until a call that raises, or names a block that is not to be evicted."""

    def __init__(self, right_calls: int, answer: object) -> None:
        super().__init__(CAPACITY)
        self.right_calls, self.answer = right_calls, answer

    def _count(self) -> None:
        self.right_calls -= 1
        if self.right_calls < 0:
            raise ZeroDivisionError("a mistake")

    def insert(self, key: Key, now: float, parent: Key | None = None) -> None:
        self._count()
        super().insert(key, now, parent)

    def access(self, key: Key, now: float) -> None:
        super().access(key, now)
        self._count()

    def finish(self, *about: object) -> None:
        self._count()

    def remove(self, key: Key) -> None:
        self._count()
        super().remove(key)

    def pin(self, key: Key) -> None:
        super().pin(key)
        self._count()

    def unpin(self, key: Key, now: float) -> None:
        self._count()
        super().unpin(key, now)

    def evict(self, now: float) -> Key | None:
        if self.right_calls <= 0 and self.answer is not ZeroDivisionError:
            return self.answer  # type: ignore[return-value]
        self._count()
        return super().evict(now)


@given(
    events=events,
    right_calls=st.integers(0, 60),
    answer=st.sampled_from([ZeroDivisionError, None, "nobody's", ["no key at all"], *KEYS]),
)
@settings(max_examples=examples(150), deadline=None)
def test_a_policy_that_makes_a_mistake_at_any_call_costs_nothing_else(
    events: list[tuple[str, object]], right_calls: int, answer: object
) -> None:
    Driver(GuardedPolicy(Mistaken(right_calls, answer))).run(events)


def test_lru_takes_the_place_of_a_policy_that_made_a_mistake() -> None:
    policy = GuardedPolicy(Mistaken(6, ZeroDivisionError))
    for key in "abcd":
        policy.insert(key, 0.0)
    policy.access("a", 1.0)
    policy.pin("b")
    policy.access("c", 2.0)
    assert [policy.evict(3.0) for _ in range(4)] == ["d", "a", "c", None]
    policy.unpin("b", 4.0)
    assert policy.evict(5.0) == "b"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("capacity", [1, 2, 3, 17])
def test_tiny_capacities(name: str, capacity: int) -> None:
    policy = make_eviction_policy(name, capacity)
    for number in range(500):
        now = math.sqrt(number)
        key = (number * 7919) % 23
        while key not in policy and len(policy) >= capacity:
            assert policy.evict(now) is not None
        policy.insert(key, now, key - 1)
        assert len(policy) <= capacity
