"""What becomes of an instance's state, event by event, and what operators are told of it."""

from __future__ import annotations

import re

import pytest

from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.instances.instance import NOT_PROBED, Instance
from kvferry.router.instances.instance import InstanceState as State

OTHER = Instance("decode", "http://other:1", name="decode-1")
EVENTS = {
    "well": lambda one: one.mark_healthy(),
    "late": lambda one: one.record_late_check("it is late"),
    "down": lambda one: one.mark_down("it is off"),
    "silent": lambda one: one.mark_unresponsive(),
    "speaks": lambda one: one.mark_responsive(),
    "duplicate": lambda one: one.mark_duplicate(OTHER),
    "alone": lambda one: one.mark_duplicate(None),
    "drain": lambda one: one.drain(),
}
TABLE = """
              well  late      down  silent        speaks  duplicate  alone  drain
new           up    degraded  down  unresponsive  -       duplicate  -      draining
up            -     degraded  down  unresponsive  -       duplicate  -      draining
degraded      up    -         down  unresponsive  -       duplicate  -      draining
unresponsive  -     -         down  -             up      -          -      draining
down          up    -         -     -             -       -          -      draining
duplicate     -     -         down  -             -       -          up     draining
draining      -     -         -     -             -       -          -      -
drained       -     -         -     -             -       -          -      -
"""
"""From a state, by an event, to a state; -: it stays."""

ROADS = {
    State.NEW: "", State.UP: "well", State.DEGRADED: "late", State.UNRESPONSIVE: "silent", State.DOWN: "down",
    State.DUPLICATE: "duplicate", State.DRAINING: "drain", State.DRAINED: "drain",
}  # fmt: skip


def rows() -> list[tuple[State, str, State]]:
    names, *lines = (re.split(r" +", line.strip()) for line in TABLE.strip().splitlines())
    found = []
    for before, *after in lines:
        found += [
            (State(before), event, State(before if to == "-" else to)) for event, to in zip(names, after, strict=True)
        ]
    return found


def in_state(state: State) -> Instance:
    one = Instance("decode", "http://here:1", name="decode-0")
    one.record_probe(InstanceFacts(engine_id="e"))
    if ROADS[state]:
        EVENTS[ROADS[state]](one)
    if state is State.DRAINED:
        one.set_drained(True)
    assert one.state is state
    return one


@pytest.mark.parametrize(("before", "event", "after"), rows(), ids=lambda one: getattr(one, "value", one))
def test_the_next_state(before: State, event: str, after: State) -> None:
    one = in_state(before)
    EVENTS[event](one)
    assert one.state is after
    assert one.usable is (after in (State.NEW, State.UP, State.DEGRADED))
    assert one.trusted is (after in (State.NEW, State.UP))


def test_one_that_is_late_three_times_in_a_row_is_down() -> None:
    one = in_state(State.UP)
    for expected in (State.DEGRADED, State.DEGRADED, State.DOWN):
        one.record_late_check("it is late")
        assert one.state is expected


@pytest.mark.parametrize("failure", ["down", "silent", "doubt"])
def test_what_it_is_stays_known_and_who_it_is_does_not_until_it_is_asked(failure: str) -> None:
    one, facts = in_state(State.UP), InstanceFacts(engine_id="e")
    {**EVENTS, "doubt": lambda one: one.invalidate()}[failure](one)
    assert (one.facts, one.confirmed) == (facts, NOT_PROBED)
    one.replace_facts(InstanceFacts(engine_id="e", stores_take_kv=False))
    assert one.confirmed is NOT_PROBED, "a request has shown that, and nobody has asked"
    one.record_probe(facts)
    assert one.confirmed is facts


@pytest.mark.parametrize("began_before_it", [False, True])
def test_a_start_is_no_return_and_a_death_is_told_of_once(
    began_before_it: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = in_state(State.NEW)
    if began_before_it:  # the router
        one.mark_down("connection refused")
    one.mark_healthy()
    assert "is back" not in caplog.text
    caplog.clear()
    one.mark_down("connection refused")  # met by a request
    one.mark_down("connection refused")  # and by the next look at its health
    one.mark_healthy()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "decode-0 (http://here:1) is not alive: connection refused",
        "decode-0 (http://here:1) is back",
    ]
