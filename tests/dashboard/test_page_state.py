"""What pages show of a deployment, and what has changed of it."""

from __future__ import annotations

from typing import Any

from kvferry.core.clock import ManualClock
from kvferry.core.messages.traffic import FleetPlan, RequestObservation, ScaleDecision, TrafficReport
from kvferry.dashboard.page_state import FeedSettings, PageState, RecentRequests
from support.page_source import FakeSource, record, view

TICK_S = 2.0
SETTINGS = FeedSettings(tick_s=TICK_S)


async def state_of(source: FakeSource, settings: FeedSettings = SETTINGS, judge: Any = None) -> PageState:
    state = PageState(source, source.clock, settings, judge)
    assert state.is_outdated
    await state.begin()
    return state


async def update(state: PageState, clock: ManualClock, seconds: float = TICK_S) -> dict[str, Any]:
    clock.advance(seconds)
    return await state.update()


async def test_what_happens_to_instances_is_said() -> None:
    clock = ManualClock()
    source = FakeSource(clock)
    state = await state_of(source)
    assert state.snapshot()["events"] == []
    source.views[1] |= {"state": "down", "alive": False}
    delta = await update(state, clock)
    assert delta["instances"] == {"decode-0": {"state": "down", "alive": False}}
    [event] = delta["events"]
    assert (event.text, event.level) == ("decode-0 is down (before: up)", "error")
    source.views[0] |= {"role": "decode"}
    [event] = (await update(state, clock))["events"]
    assert event.text == "prefill-0: its role changed from prefill to decode"
    source.views.append(view("decode-1", "decode"))
    assert (await update(state, clock))["events"][0].text == "decode-1 was added (decode)"
    del source.views[2]
    delta = await update(state, clock)
    assert delta["events"][0].text == "decode-1 was removed"
    assert delta["instances"] == {"decode-1": None}
    source.fleet_plan = FleetPlan({"decode": 2}, decisions=(ScaleDecision(1.0, "decode 1 → 2", "TTFT"),))
    assert (await update(state, clock))["events"][0].text == "scaling: decode 1 → 2 (TTFT)"
    assert "events" not in await update(state, clock)
    assert len(state.snapshot()["events"]) == 5, "a page that opens later sees them too"


async def test_after_a_pause_it_begins_again() -> None:
    clock = ManualClock()
    source = FakeSource(clock)
    source.records = [record("a", 1.0)]
    state = await state_of(source)
    await update(state, clock)
    assert not state.is_outdated
    clock.advance(3 * TICK_S)
    assert state.is_outdated
    source.views, source.records = [view("decode-7", "decode")], [record("b", 2.0)]
    await state.begin()
    snapshot = state.snapshot()
    assert list(snapshot["instances"]) == ["decode-7"]
    assert [request["request_id"] for request in snapshot["requests"]] == ["b"]
    assert snapshot["events"] == [], "instances are not new to a page that has just opened"


async def test_many_instances_are_scraped_more_rarely() -> None:
    clock = ManualClock()
    source = FakeSource(clock)
    source.views = [view(f"decode-{index}", "decode") for index in range(100)]
    state = await state_of(source, FeedSettings(tick_s=TICK_S, metrics_per_s=10.0))
    for _ in range(10):
        await update(state, clock)
    assert source.num_scrapes == 3, "when the page opens, and every ten seconds"


async def test_figures_of_instances_become_rates_and_gauges() -> None:
    clock = ManualClock()
    source = FakeSource(clock)
    source.texts = {"decode-0": b"vllm:num_requests_running 4\nvllm:generation_tokens_total 100\n", "prefill-0": None}
    state = await state_of(source)
    assert state.snapshot()["instances"]["decode-0"]["running"] == 4.0
    source.texts["decode-0"] = b"vllm:num_requests_running 4\nvllm:generation_tokens_total 1100\n"
    assert (await update(state, clock))["point"].output_tokens == 1000 / TICK_S


async def test_the_sentence_about_these_minutes() -> None:
    clock = ManualClock()
    source = FakeSource(clock)
    source.requests = [RequestObservation(clock.wall() - 1, 10, 10, state="done", first_s=0.1)]

    def judge(report: TrafficReport, views: list[dict[str, Any]], plan: FleetPlan | None) -> str:
        return f"{len(report.requests)} requests, {len(views)} instances"

    state = await state_of(source, judge=judge)
    assert state.snapshot()["verdict"] == "1 requests, 2 instances"
    del source.views[1]
    assert "verdict" not in await update(state, clock)
    assert (await update(state, clock, SETTINGS.verdict_s))["verdict"] == "1 requests, 1 instances"


def test_the_oldest_record_makes_room() -> None:
    requests = RecentRequests(2)
    first, second = record("a", 1.0), record("b", 2.0)
    assert [requests.record(decision) for decision in (first, second, first)] == [True, True, False]
    assert requests.record({**first, "reason": "other"})
    assert requests.record(record("c", 3.0))
    assert [decision["request_id"] for decision in requests.list()] == ["a", "c"]
