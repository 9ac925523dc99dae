"""What the scheduler side asks for, step by step, with no worker side."""

import pytest
from fake_engine import FakeRequest
from kv_support import make_layout

from kvferry.connectors.api import (
    ConnectorContext,
    Fetchable,
    Hit,
    Hold,
    Miss,
    Pending,
    Release,
    Released,
    ScheduledChunk,
    StepView,
)
from kvferry.connectors.p2p.plan import P2pPlan, Save, decode_meta
from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeakError, TransferTimeout
from kvferry.core.messages.hand_off import Consume, PrefillResult, Produce, Ticket
from kvferry.core.settings.transfer_config import KVTransferConfig

BLOCKS = [7, 3, 9, 1, 5]
PROMPT = list(range(18))


@pytest.fixture
def side() -> P2pSchedulerSide:
    config = KVTransferConfig(kv_connector="P2pConnector", engine_id="here")
    side = P2pSchedulerSide(ConnectorContext(config, make_layout(block_size=4)))
    side.set_addresses([{"host": "h", "port": 5, "engine_id": "here"}])
    return side


def saves(side: P2pSchedulerSide, request: FakeRequest, start: int, num_tokens: int) -> list[Save]:
    plan = side.plan(StepView([ScheduledChunk(request, start, num_tokens, tuple(BLOCKS))]))
    return plan.saves if plan is not None else []


def test_a_block_is_announced_when_its_last_token_is_computed(side: P2pSchedulerSide) -> None:
    request = FakeRequest("r", PROMPT, Produce("t"))
    assert saves(side, request, 0, 3) == [Save("t", True, 0, [])]
    assert saves(side, request, 3, 3) == [Save("t", False, 0, [7])]
    assert saves(side, request, 6, 1) == []
    assert saves(side, request, 7, 9) == [Save("t", False, 1, [3, 9, 1])]
    assert saves(side, request, 16, 2) == [Save("t", False, 4, [5])], "the prompt ends in it"
    assert saves(side, request, 18, 1) == []


def test_blocks_of_the_prefix_cache_are_announced_like_the_others(side: P2pSchedulerSide) -> None:
    request = FakeRequest("r", PROMPT, Produce("t"))
    assert saves(side, request, 8, 10) == [Save("t", True, 0, BLOCKS)]


def test_a_preempted_request_is_announced_from_the_first_block(side: P2pSchedulerSide) -> None:
    request = FakeRequest("r", PROMPT, Produce("t"))
    saves(side, request, 0, 9)
    plan = side.plan(StepView(preempted=[request]))
    assert plan == P2pPlan(resets=["t"])
    assert saves(side, request, 0, 9) == [Save("t", False, 0, [7, 3])]


def test_blocks_that_another_request_computes_again_are_announced_again(side: P2pSchedulerSide) -> None:
    ours, other = FakeRequest("r", PROMPT, Produce("t")), FakeRequest("other", PROMPT)
    saves(side, ours, 8, 4)
    plan = side.plan(StepView([ScheduledChunk(other, 4, 4, tuple(BLOCKS)), ScheduledChunk(ours, 12, 1, tuple(BLOCKS))]))
    assert plan == P2pPlan(resets=["t"], saves=[Save("t", False, 0, [7, 3, 9])])
    answer = ScheduledChunk(other, 18, 1, (*BLOCKS[:-1], 5))
    assert side.plan(StepView([answer])) is None, "what follows the prompt is nobody else's"


def test_the_end_of_a_prefill(side: P2pSchedulerSide) -> None:
    request = FakeRequest("r", PROMPT, Produce("t"))
    saves(side, request, 0, 18)
    request.prefill_result = PrefillResult(first_token=4, seed=1)
    verdict = side.finish(request, tuple(BLOCKS))
    assert isinstance(verdict, Hold)
    assert verdict.ticket is not None
    assert verdict.ticket["remote_block_ids"] == [BLOCKS]
    assert (verdict.ticket["remote_host"], verdict.ticket["remote_port"]) == ("h", 5)
    assert side.has_work()
    plan = side.plan(StepView())
    assert plan is not None
    [seal] = plan.seals
    assert decode_meta(seal.meta).prefill_result == request.prefill_result
    assert not side.has_work()
    with pytest.raises(LeakError, match="r"):
        side.check()
    side.completed([Released("r")])
    side.check()


@pytest.mark.parametrize("begins", [False, True])
def test_a_prefill_that_was_let_in_counts_until_it_begins_or_ends(*, begins: bool) -> None:
    """However many steps it waits for blocks, or for another connector that loads for it."""
    layout = make_layout(block_size=4)
    config = KVTransferConfig(kv_connector="P2pConnector", kv_buffer_size=len(BLOCKS) * layout.block_bytes)
    side = P2pSchedulerSide(ConnectorContext(config, layout))
    side.set_addresses([{"host": "h", "port": 5, "engine_id": "here"}])
    first, second = (FakeRequest(name, PROMPT, Produce(name)) for name in ("first", "second"))
    assert side.match(first, 0) == Miss()
    for _ in range(3):
        side.plan(StepView())
        assert side.match(second, 0) == Pending()
    with pytest.raises(LeakError, match="first"):
        side.check()
    if begins:
        saves(side, first, 0, 4)
        assert side.match(first, 0) == Miss(), "preempted, it does not wait for itself"
        assert side.match(second, 0) == Pending()
        assert isinstance(side.finish(first, BLOCKS), Hold)
        side.completed([Released("first")])
    else:
        side.finish(first, ())
    side.check()
    assert side.match(second, 0) == Miss()


def test_a_request_waits_for_the_end_of_the_prefill_unless_there_is_room() -> None:
    clock, asked = ManualClock(), list[int]()
    config = KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config={"unsealed_s": 60})
    context = ConnectorContext(config, make_layout(block_size=4), clock=clock, has_room=asked.append)  # type: ignore[arg-type]
    side = P2pSchedulerSide(context)
    early = Ticket(transfer_id="t", remote_host="127.0.0.1", remote_port=5)
    finished = Ticket(transfer_id="t", remote_host="127.0.0.1", remote_port=5, remote_num_tokens=len(PROMPT))
    waits, others, late = (
        FakeRequest(name, PROMPT, Consume(ticket))
        for name, ticket in (("waits", early), ("other", finished), ("late", early))
    )
    for request in (waits, others, late):
        side.arrived(request)
        hit = side.match(request, 0)
        assert hit == (Hit(len(PROMPT)) if request is others else Pending(is_reported=True))
    assert asked == [5, 5]
    side.completed([Fetchable("waits"), Fetchable("who has left")])
    assert side.match(waits, 0) == Hit(len(PROMPT))
    clock.advance(61)
    match side.match(late, 0):
        case Miss(TransferTimeout()):
            pass
        case other:
            pytest.fail(f"{other}")
    for request in (waits, others, late):
        side.finish(request, ())
    side.check()


def kept(side: P2pSchedulerSide, name: str) -> str:
    """Finish a request whose answer is kept for a next turn; returns the name of what is kept."""
    consume = Consume(Ticket(transfer_id=f"of {name}"), keep=True)
    request = FakeRequest(name, PROMPT, consume, num_computed=len(PROMPT), state="done")
    verdict = side.finish(request, BLOCKS)
    assert isinstance(verdict, Hold)
    assert verdict.ticket is not None
    return str(verdict.ticket["remote_transfer_id"])


def test_what_is_kept_for_next_turns_gives_way_to_requests_that_wait_for_blocks(side: P2pSchedulerSide) -> None:
    names = [kept(side, name) for name in "abc"]
    side.plan(StepView())
    side.make_room(len(BLOCKS) + 1)
    plan = side.plan(StepView())
    assert plan is not None
    assert plan.ends == names[:2]
    side.make_room(len(BLOCKS) + 1)  # as with each step, until their blocks are free
    assert side.plan(StepView()) is None
    side.completed([Released("a"), Released("b")])
    side.make_room(1)
    plan = side.plan(StepView())
    assert plan is not None
    assert plan.ends == names[2:]
    side.completed([Released("c")])
    side.make_room(1)
    assert side.plan(StepView()) is None
    side.check()


def test_what_is_kept_for_next_turns_gives_way_to_prefills() -> None:
    layout = make_layout(block_size=4)
    config = KVTransferConfig(kv_connector="P2pConnector", kv_buffer_size=2 * len(BLOCKS) * layout.block_bytes)
    side = P2pSchedulerSide(ConnectorContext(config, layout))
    side.set_addresses([{"host": "h", "port": 5, "engine_id": "here"}])
    names = [kept(side, name) for name in "ab"]
    side.plan(StepView())
    prefill = FakeRequest("r", PROMPT, Produce("t"))
    assert side.match(prefill, 0) == Pending()
    plan = side.plan(StepView())
    assert plan is not None
    assert plan.ends == names[:1]
    side.completed([Released("a")])
    assert side.match(prefill, 0) == Miss()


def test_a_request_that_never_ran_is_released(side: P2pSchedulerSide) -> None:
    assert side.finish(FakeRequest("r", PROMPT, Produce("t")), ()) == Release()
    plan = side.plan(StepView())
    assert plan == P2pPlan(drops={"t": ""}), "somebody may wait for it"
    assert not side.has_work()
    side.check()


def test_who_waits_for_a_prefill_that_was_refused_is_told_unless_another_makes_it(side: P2pSchedulerSide) -> None:
    side.refused("t")
    assert side.has_work()
    assert side.plan(StepView()) == P2pPlan(drops={"t": ""})
    saves(side, FakeRequest("r", PROMPT, Produce("t")), 0, 18)
    side.refused("t")
    assert not side.has_work()


def test_what_a_plan_that_failed_was_to_announce_is_not_announced_later(
    side: P2pSchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = FakeRequest("r", PROMPT, Produce("t"))
    chunk = ScheduledChunk(request, 0, 18, tuple(BLOCKS))
    with monkeypatch.context() as patch:
        patch.setattr(P2pPlan, "take", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            side.plan(StepView([chunk]))
    assert side.finish(request, tuple(BLOCKS)) == Release()
    assert side.plan(StepView()) == P2pPlan(drops={"t": ""})
    side.check()
