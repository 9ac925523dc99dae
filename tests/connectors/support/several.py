"""Engines with several connectors, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, FakeRequest

from kvferry.core.messages.hand_off import Consume, parse_hand_off

MakeEngine = Callable[..., FakeEngine]


PROMPT = list(range(100, 119))


HAND_OFF = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": "shm"}}


def storage(folder: Path, **more: Any) -> dict[str, Any]:
    return {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": f"file:{folder}"}, **more}


def memory(name: str) -> dict[str, Any]:
    extra = {"num_cpu_blocks": 64, "block_size": 8, "eviction_policy": "s3fifo"}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def settle(engine: FakeEngine, index: int = 1) -> None:
    """Until all that was saved is in that one's store."""
    engine.run_until(engine.worker.children[index].is_flushed)


def consumed(tokens: Sequence[int], ticket: dict[str, Any] | None, name: str = "d") -> FakeRequest:
    hand_off = parse_hand_off(ticket, name)
    assert isinstance(hand_off, Consume)
    request = FakeRequest(name, list(tokens), hand_off)
    request.prefill_result = hand_off.ticket.prefill_result
    return request
