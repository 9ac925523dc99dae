"""A release is rolled out process by process: what a newer one sends, an older one reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import kvferry.fleet.control.router_client
import kvferry.router.edge.admin  # noqa: F401
from kvferry.core.messages.instance_facts import read_facts
from kvferry.core.peer_message import PeerMessage

REQUIRED = {
    "Announcement": {"process", "url", "role"},
    "Challenge": {"server", "now_ns", "proof"},
    "ScaleDecision": {"at", "what", "why"},
    "Declaration": set[str](),
    "DeclaredInstance": {"name", "role", "url"},
    "EventsAddress": {"endpoint"},
    "FleetPlan": {"desired"},
    "InstanceFacts": set[str](),
    "Registered": {"lease_s"},
    "ReportedLimits": set[str](),
    "RouterInstanceView": {"name", "role", "state", "in_flight", "draining", "drained"},
    "TicketKinds": set[str](),
    "TrafficReport": {"now", "num_arrived", "num_waiting", "requests"},
}
"""Fields without a default, by message. Do not add to them: a sender of an older release leaves a new field out."""

MESSAGES = sorted(PeerMessage.__subclasses__(), key=lambda kind: kind.__name__)


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """All structs that decoding `kind` may meet."""
    left, seen = [inspect.type_info(kind)], set[type]()
    while left:
        info = left.pop()
        if isinstance(info, inspect.StructType):
            if info.cls in seen:
                continue
            seen.add(info.cls)
            yield info.cls
            left += [field.type for field in info.fields]
        for name in ("item_type", "key_type", "value_type", "types", "item_types", "type"):
            value = getattr(info, name, None)
            left += list(value) if isinstance(value, tuple) else [value] if isinstance(value, inspect.Type) else []


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_ignores_fields_of_a_newer_release(kind: type[PeerMessage]) -> None:
    strict = [struct.__name__ for struct in structs_in(kind) if struct.__struct_config__.forbid_unknown_fields]
    assert not strict


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_needs_no_more_fields_than_older_releases_send(kind: type[PeerMessage]) -> None:
    required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
    assert required == REQUIRED[kind.__name__]


def test_the_report_of_a_newer_instance_is_read() -> None:
    content = {
        "engine_id": "e",
        "model_names": ["m"],
        "of_the_next_release": {"a": 1},
        "tickets": {"writes": ["kv"], "new": True},
        "kv_events": {"endpoint": "tcp://127.0.0.1:1", "codec": "x"},
    }
    facts = read_facts(msgspec.json.encode(content))
    assert (facts.engine_id, facts.tickets.writes) == ("e", ("kv",))
