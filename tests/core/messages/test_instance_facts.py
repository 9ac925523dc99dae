"""What an instance says of itself: read strictly, and what it can do in a hand-off."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core.errors import ProtocolError
from kvferry.core.messages.instance_facts import EventsAddress, InstanceFacts, TicketKinds, read_facts

FACTS = InstanceFacts(engine_id="e", model_names=["m"], connector="P2pConnector", kv_port=5)


def test_facts_are_read_as_they_were_written() -> None:
    assert read_facts(msgspec.json.encode(FACTS)) == FACTS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"engine_id":"e"}',
        b'{"model_names":["m"]}',
        b"\xff",
    ],
)
def test_what_no_instance_says_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_facts(content)


def test_fields_of_a_newer_release_are_ignored() -> None:
    assert read_facts(msgspec.json.encode(msgspec.to_builtins(FACTS) | {"new": 1})) == FACTS


@pytest.mark.parametrize("field", [{"kv_port": 70000}, {"tp_size": 0}, {"num_kv_tokens": -1}, {"role": "other"}])
def test_numbers_have_bounds(field: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(field))):
        read_facts(msgspec.json.encode(msgspec.to_builtins(FACTS) | field))


@pytest.mark.parametrize(
    ("writes", "reads", "readable"),
    [((), ("a",), False), (("a",), ("a", "b"), True), (("a",), ("b",), False), (None, (), True), (("a",), None, True)],
)
def test_kinds_of_tickets_must_meet(
    writes: tuple[str, ...] | None, reads: tuple[str, ...] | None, readable: bool
) -> None:
    assert TicketKinds(writes=writes).is_readable_by(TicketKinds(reads=reads)) == readable


def test_a_role_limits_the_kinds() -> None:
    kinds = TicketKinds(writes=("a",), reads=("b",))
    assert kinds.within(produces=True, consumes=False) == TicketKinds(writes=("a",), reads=())


def test_an_instance_serves_as_what_it_was_started_for() -> None:
    assert FACTS.can_serve_as("prefill")
    decode = msgspec.structs.replace(FACTS, role="decode")
    assert (decode.can_serve_as("prefill"), decode.can_serve_as("decode")) == (False, True)
    assert not msgspec.structs.replace(FACTS, connector=None).can_serve_as("prefill")
    assert not msgspec.structs.replace(FACTS, tickets=TicketKinds(writes=())).can_serve_as("prefill")


def test_its_source_is_where_it_is_reached() -> None:
    source = FACTS.source("host")
    assert source is not None
    assert (source.host, source.port) == ("host", 5)
    own = msgspec.structs.replace(FACTS, kv_host="other").source("host")
    assert own is not None
    assert own.host == "other"
    assert msgspec.structs.replace(FACTS, kv_port=0).source("host") is None


def test_events_of_all_interfaces_are_at_the_instances_host() -> None:
    address = EventsAddress(endpoint="tcp://0.0.0.0:1", replay_endpoint="tcp://[::]:2")
    assert address.reachable_at("10.0.0.1") == EventsAddress(
        endpoint="tcp://10.0.0.1:1", replay_endpoint="tcp://10.0.0.1:2"
    )
    assert address.reachable_at("::1").endpoint == "tcp://[::1]:1"
    assert EventsAddress(endpoint="tcp://h:1").reachable_at("x") == EventsAddress(endpoint="tcp://h:1")
