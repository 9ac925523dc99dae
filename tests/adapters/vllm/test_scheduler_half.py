"""What the scheduler's half makes of vLLM's calls, with a recording scheduler side in place of a connector's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.api import Failed, Hit, Hold, Loaded, TransferEvent
from kvferry.connectors.report_codec import encode_report
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import PeerLost

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 8
LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", block_size=BLOCK_SIZE, layers=(LayerLayout(1, 4, 4),))


class Side:
    """A scheduler side that matches and plans what the test says, and records its allocations."""

    def __init__(self) -> None:
        self.hit = Hit(0)
        self.next_plan: str | None = None
        self.waits = False
        self.allocations: list[tuple[Any, ...]] = []

    def arrived(self, view: object) -> None:
        pass

    def match(self, view: object, num_computed_tokens: int) -> Hit:
        return self.hit

    def plan(self, step: object) -> str | None:
        plan, self.next_plan = self.next_plan, None
        return plan

    def has_work(self) -> bool:
        return self.waits

    def completed(self, report: Any) -> None:
        pass

    def finish(self, *what: Any) -> Hold:
        return Hold(None)

    def allocated(self, *what: Any) -> None:
        self.allocations.append(what)


class Idle:
    """Notes what each step was told to be."""

    max_s = 0.02

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def step(self, *, has_work: bool) -> None:
        self.steps.append(has_work)


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def idle() -> Idle:
    return Idle()


def make_half(side: Side, windows: Sequence[int | None] = (None,), **settings: Any) -> Any:
    """`windows`: of the KV cache groups."""
    from kvferry.adapters.vllm.identity.salts import Salts
    from kvferry.adapters.vllm.pins import Pins
    from kvferry.adapters.vllm.scheduler_half import SchedulerHalf
    from kvferry.adapters.vllm.sections import Partition

    options: Any = SimpleNamespace(options=SimpleNamespace(hand_off=True))
    partition = Partition(windows, BLOCK_SIZE)
    return SchedulerHalf(options, side, LAYOUT, partition, Pins(None), Salts(), **settings)  # type: ignore[arg-type]


@pytest.fixture
def half(side: Side, idle: Idle) -> Any:
    return make_half(side, idle=idle)


def step(num_tokens: int = 0) -> Any:
    """vLLM's `SchedulerOutput`, of requests that the half does not know."""
    return SimpleNamespace(
        preempted_req_ids=None,
        num_scheduled_tokens={"unknown": num_tokens} if num_tokens else {},
        total_num_scheduled_tokens=num_tokens,
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=None),
    )


def add_request(half: Any, hit: Hit, request_id: str = "r") -> Any:
    """A request of 20 tokens for which the side has matched `hit`."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    request = Request(request_id, list(range(20)), SamplingParams(max_tokens=1), None)
    half.add(request)
    half.side.hit = hit
    half.match(request, 0)
    return request


def test_the_loop_may_sleep_only_in_steps_without_work(half: Any, side: Side, idle: Idle) -> None:
    half.plan(step())
    half.plan(step(num_tokens=3))
    side.next_plan = "plan"
    half.plan(step())
    side.waits = True
    half.plan(step())
    side.waits = False
    request = add_request(half, Hit(0))
    half.plan(step())
    half.finish(request, [[]])
    half.plan(step())
    assert idle.steps == [False, True, True, True, True, False]


def test_steps_last_longer_only_while_all_requests_load(half: Any, idle: Idle) -> None:
    assert half.plan(step()).wait_s == 0
    request = add_request(half, Hit(16))
    assert half.plan(step()).wait_s == 0
    half.allocated(request, [[4, 5, 6]], 16)
    assert half.plan(step()).wait_s == idle.max_s
    assert half.plan(step(num_tokens=1)).wait_s == 0
    another = add_request(half, Hit(0), "another")
    assert half.plan(step()).wait_s == 0
    half.finish(another, [[]])
    assert half.plan(step()).wait_s == idle.max_s
    report(half, Loaded("r#0"))
    assert half.plan(step()).wait_s == idle.max_s
    report(half, Loaded("r"))
    assert half.plan(step()).wait_s == 0


def test_a_load_goes_into_the_blocks_that_vllm_has_reserved(half: Any, side: Side) -> None:
    request = add_request(half, hit := Hit(16))
    half.allocated(request, [[4, 5, 6]], 16)
    [(view, *allocation)] = side.allocations
    assert (view.request_id, allocation) == ("r", [[4, 5, 6], 0, hit])
    assert half.plan(step()).loads == {"r": [4, 5, 6]}


def test_a_load_without_a_block_is_refused_and_nobody_writes(half: Any, side: Side) -> None:
    """Block 0 is vLLM's null block, which all requests share."""
    request = add_request(half, Hit(16))
    half.allocated(request, [[0, 5, 6]], 16)
    assert side.allocations == []
    metadata = half.plan(step())
    assert metadata.refused == {"r"}
    assert not metadata.loads
    assert half.match(request, 0) == (0, False), "vLLM computes it"
    assert half.num_failures == {"TransferError": 1}


@pytest.mark.parametrize(
    ("is_alone", "windows", "waits"),
    [(True, [None], False), (False, [None], True), (True, [None, 16], True)],
    ids=["alone", "beside-others", "several-groups"],
)
def test_a_request_waits_for_its_load_where_others_would_keep_what_is_computed_without_it(
    side: Side, is_alone: bool, windows: list[int | None], waits: bool
) -> None:
    half = make_half(side, windows, is_alone=is_alone)
    request = add_request(half, Hit(16, layerwise=True))
    assert half.match(request, 0) == (16, waits)
    half.allocated(request, [[4, 5, 6], [7, 8, 9]][: len(windows)], 16)
    assert {hit.layerwise for *_, hit in side.allocations} == {not waits}


def report(half: Any, *events: TransferEvent) -> None:
    from kvferry.adapters.vllm.messages import RankReport, WorkerReports

    half.completed(WorkerReports([RankReport(0, encode_report(list(events)))]))


@pytest.mark.parametrize("event", [Loaded("r"), Failed("r", PeerLost("gone"))], ids=["loaded", "failed"])
def test_a_load_that_ended_is_not_taken_for_one_that_was_given_up(half: Any, event: TransferEvent) -> None:
    request = add_request(half, Hit(16))
    half.allocated(request, [[4, 5, 6]], 16)
    half.plan(step())
    report(half, event)
    assert half.plan(step()).forgotten == {"r"}
    assert half.finish(request, [[4, 5, 6]])[0]
    assert not half.has_work()
    half.check()


def test_a_load_after_another_of_the_same_request_is_not_forgotten(half: Any) -> None:
    request = add_request(half, Hit(16))
    half.allocated(request, [[4, 5, 6]], 16)
    half.plan(step())
    report(half, Loaded("r", 8))
    half.side.hit = Hit(8)
    half.match(request, 8)
    half.allocated(request, [[4, 5, 6]], 8)
    metadata = half.plan(step())
    assert (metadata.loads, metadata.forgotten) == ({"r": [4, 5, 6]}, set())


def test_a_load_given_up_is_waited_for(half: Any) -> None:
    request = add_request(half, Hit(16))
    half.allocated(request, [[4, 5, 6]], 16)
    half.plan(step())
    assert half.finish(request, [[4, 5, 6]])[0]
    report(half, Loaded("r"))
    assert not half.plan(step()).forgotten
    assert half.has_work()
