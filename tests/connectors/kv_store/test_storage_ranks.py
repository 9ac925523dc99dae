"""The shared storage connector on several ranks: each keeps its own share, and only whole blocks count."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, FakeRequest
from kv_support import make_layout, sharded

from kvferry.connectors.kv_store.plan import StorePlan
from kvferry.connectors.kv_store.worker import KVStoreWorkerSide
from kvferry.core.errors import ConfigError, LayoutMismatch
from kvferry.core.messages.hand_off import Consume, Produce, parse_hand_off

LAYOUT = sharded(make_layout(2), 2)
PROMPT = list(range(100, 119))
Make = Callable[..., FakeEngine]


@pytest.fixture
def make(make_engine: Callable[..., FakeEngine], tmp_path: Path) -> Make:
    def made(**options: Any) -> FakeEngine:
        options = {"layout": LAYOUT, "shared_storage_path": str(tmp_path)} | options
        return make_engine("SharedStorageConnector", **options)

    return made


def consumed(tokens: list[int], ticket: dict[str, Any] | None) -> FakeRequest:
    hand_off = parse_hand_off(ticket, "t")
    assert isinstance(hand_off, Consume)
    return FakeRequest("decode", tokens, hand_off, prefill_result=hand_off.ticket.prefill_result)


def until_written(engine: FakeEngine) -> None:
    engine.run_until(lambda: all(worker.is_flushed() for worker in engine.workers))


def test_a_hand_off_through_the_store(make: Make, tmp_path: Path) -> None:
    producer, consumer = make(), make()
    prefill = producer.run(FakeRequest("prefill", PROMPT, Produce("t")))
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, len(PROMPT) % LAYOUT.block_size)
    until_written(consumer)
    consumer.run_until(lambda: not list(tmp_path.glob("transfers/*.mark")))


class SecondSavesNothing(KVStoreWorkerSide):
    """Of the second rank, neither a block nor a marker is written."""

    def start(self, plan: StorePlan | None) -> None:
        if plan is not None and self.context.layout.tp_rank == 1:
            plan = msgspec.structs.replace(plan, saves=[], marks=[])
        super().start(plan)


def test_a_hand_off_is_announced_when_every_rank_has_written(make: Make) -> None:
    producer, consumer = make(build_worker=SecondSavesNothing), make(timeout_s=0.3)
    prefill = producer.run(FakeRequest("prefill", PROMPT, Produce("t")))
    until_written(producer)
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert "did not reach" in str(decode.error)
    assert decode.num_computed_here == len(PROMPT)


def test_a_block_counts_only_where_every_rank_has_it(make: Make, tmp_path: Path) -> None:
    first = make()
    first.run(FakeRequest("a", PROMPT))
    until_written(first)
    files = sorted(tmp_path.glob("*/*/*.kv"))
    assert len(files) == 2 * (len(PROMPT) // LAYOUT.block_size)
    files[0].unlink()
    second = make()
    again = second.run(FakeRequest("b", PROMPT))
    assert again.error is None, "it was not thought to be there"
    until_written(second)
    assert len(sorted(tmp_path.glob("*/*/*.kv"))) == len(files), "and was written again"


def test_layerwise_is_of_one_rank(make: Make) -> None:
    with pytest.raises(ConfigError, match="one rank only"):
        make(load="layerwise")


def test_another_number_of_ranks_is_named_at_once(make: Make) -> None:
    producer, consumer = make(), make(layout=make_layout(2))
    prefill = producer.run(FakeRequest("prefill", PROMPT, Produce("t")))
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert isinstance(decode.error, LayoutMismatch)
