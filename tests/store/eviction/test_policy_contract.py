"""kvferry's own eviction policies do what is asked of everybody's; and what only some of them do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.store.eviction.base import BlockKey
from kvferry.store.eviction.guarded import GuardedPolicy
from kvferry.store.eviction.reuse import Reuse
from kvferry.store.eviction.table import POLICIES, make_eviction_policy
from kvferry.testing.eviction import CAPACITY, KEYS, PROMPTS, WAITS_S, EvictionContract, EvictionDriver
from support.examples import examples

requests = st.tuples(st.just("request"), st.sampled_from(PROMPTS))
finishes = st.tuples(st.just("finish"), st.tuples(st.sampled_from(PROMPTS), st.integers(0, 10**6)))
on_keys = st.tuples(st.sampled_from(["pin", "unpin", "remove", "access", "evict", "insert"]), st.sampled_from(KEYS))
waits = st.tuples(st.just("wait"), st.sampled_from(WAITS_S))
events = st.lists(requests | finishes | on_keys | waits, max_size=120)


class TestPolicies(EvictionContract):
    @pytest.fixture(params=POLICIES)
    def name(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


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

    def insert(self, key: BlockKey, now: float, parent: BlockKey | None = None) -> None:
        self._count()
        super().insert(key, now, parent)

    def access(self, key: BlockKey, now: float) -> None:
        super().access(key, now)
        self._count()

    def finish(self, *about: object) -> None:
        self._count()

    def remove(self, key: BlockKey) -> None:
        self._count()
        super().remove(key)

    def pin(self, key: BlockKey) -> None:
        super().pin(key)
        self._count()

    def unpin(self, key: BlockKey, now: float) -> None:
        self._count()
        super().unpin(key, now)

    def evict(self, now: float) -> BlockKey | None:
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
    EvictionDriver(GuardedPolicy(Mistaken(right_calls, answer))).run(events)


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
