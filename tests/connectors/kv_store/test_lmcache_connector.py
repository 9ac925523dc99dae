"""`LMCacheConnector` over a real server of LMCache's: hand-offs, and a prompt that another instance has had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, FakeRequest

from kvferry.core.messages.hand_off import Consume, Produce, Ticket, parse_hand_off

PROMPT = list(range(100, 119))
BLOCK = 4
Make = Callable[..., FakeEngine]


@pytest.fixture
def make(make_engine: Make, lmcache_port: int) -> Make:
    remote = {"lmcache.local_cpu": False, "lmcache.remote_url": f"lm://127.0.0.1:{lmcache_port}"}

    def make(role: str) -> FakeEngine:
        return make_engine("LMCacheConnectorV1", role, **remote)

    return make


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_p_and_d_hand_off(make: Make, form: str) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prompt, key = [len(form), *PROMPT], f"lmcache-{form}"
    params = Ticket(transfer_id=key).to_params()
    if form == "sequential":
        params = producer.run(FakeRequest("p", prompt, Produce(key))).ticket or {}
    hand_off = parse_hand_off(params, key)
    assert isinstance(hand_off, Consume)
    decode = consumer.add(FakeRequest("d", prompt, hand_off, prefill_result=hand_off.ticket.prefill_result))
    if form == "concurrent":
        consumer.step()
        producer.run(FakeRequest("p", prompt, Produce(key)))
    consumer.run_until(lambda: decode.state == "done" and not consumer.scheduler.has_work())
    assert (decode.error, decode.num_computed_here) == (None, len(prompt) % BLOCK)
    consumer.require_right(decode)


def test_what_one_computed_another_loads(make: Make) -> None:
    first, second = make("kv_both"), make("kv_both")
    first.run(FakeRequest("a", PROMPT))
    first.run_until(first.worker.is_flushed)
    again = second.run(FakeRequest("b", PROMPT))
    assert (again.error, again.num_computed_here) == (None, len(PROMPT) % BLOCK)
    second.require_right(again)
