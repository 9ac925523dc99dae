"""Plans for the cache connector's worker sides: which must be sent now."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.connectors.kv_store.plan import FinishedRequest, LoadBlocks, SaveBlocks, StoreKeys, StorePlan

FULL = {
    "cancels": ["r"],
    "loads": [LoadBlocks("r", [b"h"], [1], True)],
    "saves": [SaveBlocks("r", [b"h"], [1])],
    "forgets": ["t"],
    "keys": [StoreKeys("", ["k", None], [b"h"], "", 4, 60.0)],
    "flushes": ["r"],
}


@pytest.mark.parametrize("field", FULL)
def test_any_work_is_sent_at_once(field: str) -> None:
    assert StorePlan(**{field: FULL[field]})


def test_hints_alone_can_wait() -> None:
    assert not StorePlan()
    assert not StorePlan(finished=[FinishedRequest([b"h"], 3)])


def test_a_plan_travels_between_processes() -> None:
    plan = StorePlan(**FULL)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StorePlan) == plan


def test_plans_do_not_share_their_lists() -> None:
    first = StorePlan()
    first.forgets.append("t")
    assert StorePlan().forgets == []
