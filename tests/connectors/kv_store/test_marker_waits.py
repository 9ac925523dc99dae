"""How long the markers of producers are waited for that leave them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeRequest

from kvferry.connectors.kv_store import marker_waits
from kvferry.connectors.kv_store.marker_waits import MAX_PRODUCERS, SILENT_S, MarkerWaits
from kvferry.core.errors import TransferTimeout
from kvferry.core.hand_off import Consume, PrefillResult, Produce, Ticket, parse_hand_off

LONG_S = 30.0
PROMPT = list(range(100, 119))


def told(producer: str, *, over: bool = True) -> Ticket:
    return Ticket(
        transfer_id="t", remote_engine_id=producer, prefill_result=PrefillResult(first_token=1) if over else None
    )


def test_a_producer_whose_markers_never_come_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    waits = MarkerWaits(LONG_S)
    assert waits.longest_s(told("p")) == LONG_S
    for _ in range(2):
        waits.ran_out(told("p"))
        assert waits.longest_s(told("p")) == SILENT_S
    assert waits.longest_s(told("p", over=False)) == waits.longest_s(told("q")) == LONG_S
    assert caplog.text.count("no marker of p has ever come: do both name the same store?") == 1
    waits.came(told("p"))
    waits.ran_out(told("p"))
    assert waits.longest_s(told("p")) == LONG_S


def test_a_prefill_that_may_still_run_says_nothing() -> None:
    waits = MarkerWaits(LONG_S)
    waits.ran_out(told("p", over=False))
    waits.ran_out(told(""))
    assert waits.longest_s(told("p")) == waits.longest_s(told("")) == LONG_S
    assert MarkerWaits(0.5).longest_s(told("p")) == 0.5


def test_not_all_producers_are_remembered() -> None:
    waits = MarkerWaits(LONG_S)
    for number in range(MAX_PRODUCERS + 1):
        waits.ran_out(told(f"p{number}"))
    assert waits.longest_s(told("p0")) == LONG_S
    assert waits.longest_s(told("p1")) == SILENT_S


def test_what_two_engines_find_out_about_their_stores(
    make_engine: Callable[..., FakeEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker_waits, "SILENT_S", 0.05)

    def make(role: str, folder: str, **more: Any) -> FakeEngine:
        return make_engine("SharedStorageConnector", role, shared_storage_path=str(tmp_path / folder), **more)

    def hand_off(producer: FakeEngine, key: str) -> FakeRequest:
        prompt = [*key.encode(), *PROMPT]
        prefill = producer.run(FakeRequest(f"{key}-p", prompt, Produce(key)))
        producer.run_until(producer.worker._writer.is_empty)
        consume = parse_hand_off(prefill.ticket, key)
        assert isinstance(consume, Consume)
        decode = FakeRequest(f"{key}-d", prompt, consume, prefill_result=consume.ticket.prefill_result)
        waited.append(consumer.scheduler._waits.longest_s(consume.ticket))
        return consumer.run(decode)

    waited: list[float] = []
    consumer = make("kv_consumer", "here", timeout_s=0.1)
    same, other = make("kv_producer", "here"), make("kv_producer", "there")
    assert hand_off(same, "a").error is None
    for key in "bc":
        assert isinstance(hand_off(other, key).error, TransferTimeout)
    assert hand_off(same, "d").error is None
    assert waited == [0.1, 0.1, 0.05, 0.1]
    assert caplog.text.count("has ever come") == 1
