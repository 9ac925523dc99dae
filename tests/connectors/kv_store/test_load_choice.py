"""What loads and steps tell of speeds, and how often a decision counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_engine import FakeRequest
from kv_support import make_layout

from kvferry.connectors.api import ConnectorContext, Hit, Miss, ScheduledChunk, StepView
from kvferry.connectors.kv_store.load_choice import LoadChoice
from kvferry.connectors.kv_store.load_policy import LoadDecision, LoadMode, LoadPolicy
from kvferry.connectors.kv_store.settings import StoreSettings
from kvferry.core.clock import ManualClock
from kvferry.core.errors import StoreError, TransferTimeout
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.store.block_run import BlockRun

RUNS = (BlockRun(0, 4),)
PROMPT = list(range(19))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


class Recompute(LoadPolicy):
    """Always decides to load nothing."""

    def decide(self, runs: Sequence[BlockRun], *arguments: object, **options: object) -> LoadDecision:
        return LoadDecision(LoadMode.RECOMPUTE, 0, 0)


@pytest.fixture
def choice(clock: ManualClock) -> LoadChoice:
    return make_choice(clock, LoadPolicy)


def make_choice(clock: ManualClock, policy: type[LoadPolicy]) -> LoadChoice:
    settings = StoreSettings(store="memory:1MiB", load_policy="measured")
    config = KVTransferConfig(kv_connector="KVStoreConnector")
    layout = make_layout()
    context = ConnectorContext(config, layout, clock=clock, computes_meanwhile=True)
    return LoadChoice(settings, context, policy(layout.block_bytes, layout.block_size), has_layers=True)


def step(start: int = 0, num_tokens: int = 8) -> StepView:
    return StepView([ScheduledChunk(FakeRequest("a", PROMPT), start, num_tokens, ())])


def load(choice: LoadChoice, clock: ManualClock, seconds: float, error: Exception | None = None) -> None:
    choice.on_load_started("a", RUNS)
    clock.advance(seconds)
    if error is None:
        choice.on_loaded("a", seconds)
    else:
        choice.on_failed("a", error)  # type: ignore[arg-type]


def speed(choice: LoadChoice) -> float | None:
    return choice.statistics().get("tier0_load_bytes_per_s")


def test_a_load_that_is_given_up_counts_as_slow(choice: LoadChoice, clock: ManualClock) -> None:
    load(choice, clock, 30.0, TransferTimeout("late"))
    assert speed(choice) == pytest.approx(4 * make_layout().block_bytes / 30)
    assert choice.num_tracked() == 0


def test_a_load_that_fails_late_counts_as_slow_and_one_that_fails_early_not(
    choice: LoadChoice, clock: ManualClock
) -> None:
    load(choice, clock, 0.001, StoreError("damaged"))
    assert speed(choice) is None, "nothing is known, and this says nothing"
    load(choice, clock, 1.0)
    before = speed(choice)
    assert before is not None
    load(choice, clock, 0.001, StoreError("damaged"))
    assert speed(choice) == before
    load(choice, clock, 9.0, StoreError("gone"))
    after = speed(choice)
    assert after is not None
    assert after < before / 2


def test_steps_that_wait_for_layers_say_nothing_of_the_model(choice: LoadChoice, clock: ManualClock) -> None:
    choice.on_step_started(step(), loads_by_layers=True)
    clock.advance(5.0)
    choice.on_step_ended()
    assert "prefill_tokens_per_s" not in choice.statistics()
    choice.on_step_started(step())
    clock.advance(2.0)
    choice.on_step_ended()
    assert choice.statistics()["prefill_tokens_per_s"] == pytest.approx(4)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (16, 0)])
def test_a_decision_to_compute_counts_once_and_when_it_is_carried_out(
    clock: ManualClock, start: int, count: int
) -> None:
    """It may be asked for many times, and another connector may load the blocks."""
    choice = make_choice(clock, Recompute)
    for _ in range(3):
        assert isinstance(choice.choose("a", RUNS, 3, may_compute=True), Miss)
    assert choice.statistics()["load_decisions_recompute"] == 0
    for first in (start, start + 2):
        choice.on_step_started(step(first, 2))
        choice.on_step_ended()
    assert choice.statistics()["load_decisions_recompute"] == count
    assert choice.num_tracked() == 0
    assert isinstance(choice.choose("a", RUNS, 3, may_compute=False), Hit)
