"""What a ticket's seals vouch for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import AuthenticationFailed, InvalidRequest, LeaseEnded, ProtocolError
from kvferry.core.messages.hand_off import Consume, PrefillResult, Ticket, TokenLogprobs, parse_hand_off
from kvferry.core.messages.ticket_seal import TicketSealer


def make_ticket(**more: Any) -> Ticket:
    result = PrefillResult(first_token=3, seed=2**62 + 1, logprobs=TokenLogprobs(3, -0.1, 1, {3: -0.1, 4: -2.5}))
    fields: dict[str, Any] = {
        "transfer_id": "t",
        "remote_engine_id": "p",
        "remote_host": "192.0.2.7",
        "remote_port": 5000,
        "remote_num_tokens": 2,
        "remote_prefixes": [(2, "0" * 32)],
        "prefill_result": result,
    }
    return Ticket(**fields | more)


def over_the_wire(ticket: Ticket) -> Ticket:
    hand_off = parse_hand_off(ticket.to_params(), "r")
    assert isinstance(hand_off, Consume)
    return hand_off.ticket


def test_a_sealed_ticket_is_believed_by_its_fleet_alone() -> None:
    ticket = over_the_wire(TicketSealer("ours").seal(make_ticket(), 30.0))
    assert TicketSealer("ours").refusal(ticket) is None
    assert isinstance(TicketSealer("theirs").refusal(ticket), AuthenticationFailed)


def test_an_address_alone_is_enough_where_nothing_else_is_said() -> None:
    sealer = TicketSealer("ours")
    early = make_ticket(prefill_result=None)
    early.remote_address_seal = sealer.address_seal(make_ticket())
    assert sealer.refusal(over_the_wire(early)) is None
    early.transfer_id = "of the router's own choosing".replace(" ", "-")
    assert sealer.refusal(over_the_wire(early)) is None
    early.prefill_result = PrefillResult(first_token=9)
    assert isinstance(sealer.refusal(over_the_wire(early)), AuthenticationFailed)


def test_it_holds_for_its_lease() -> None:
    clock = ManualClock(1000.0)
    sealer = TicketSealer("ours", clock)
    ticket = sealer.seal(make_ticket(), 30.0)
    clock.advance(30.0 + TicketSealer.skew_s)
    assert sealer.refusal(ticket) is None
    clock.advance(1.0)
    assert isinstance(sealer.refusal(ticket), LeaseEnded)


def test_without_a_token_only_this_machine_is_taken() -> None:
    sealer = TicketSealer("")
    assert sealer.address_seal(make_ticket()) == ""
    assert isinstance(sealer.refusal(sealer.seal(make_ticket(), 30.0)), ProtocolError)
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert sealer.refusal(make_ticket(remote_host=host)) is None
    for host in ("localhost.example.org", "0.0.0.0", "::", "127.1", "2130706433", "127.0.0.1.example.org", "a"):
        assert isinstance(sealer.refusal(make_ticket(remote_host=host)), ProtocolError), host
    ranks = [("127.0.0.1", 5), ("192.0.2.7", 5)]
    assert isinstance(sealer.refusal(make_ticket(remote_host="127.0.0.1", remote_ranks=ranks)), ProtocolError)


def test_where_nobody_connects_the_address_is_nobodys_business() -> None:
    sealer = TicketSealer("ours")
    assert sealer.refusal(Ticket(transfer_id="t", remote_host="anywhere"), connects=False) is None
    assert isinstance(sealer.refusal(make_ticket(), connects=False), AuthenticationFailed)


OUT_OF_BOUNDS: list[dict[str, Any]] = [
    {"transfer_id": "x" * 257},
    {"transfer_id": "a b"},
    {"transfer_id": "a\n"},
    {"transfer_id": "\ud800"},
    {"transfer_id": 5},
    {"remote_host": "a..b"},
    {"remote_host": ".a"},
    {"remote_host": "a/b"},
    {"remote_host": "a" * 254},
    {"remote_port": -1},
    {"remote_port": 2**16},
    {"remote_port": 2**70},
    {"tp_size": 0},
    {"tp_size": 65},
    {"tp_size": 20_000},
    {"remote_ranks": [["127.0.0.1", 5]] * 65},
    {"remote_ranks": [["a..b", 5]]},
    {"remote_num_tokens": -1},
    {"remote_num_tokens": 2**31},
    {"remote_prefixes": [[1, "0" * 32]] * 65},
    {"remote_prefixes": [[2**70, "0" * 32]]},
    {"remote_prefixes": [[1, "0" * 31]]},
    {"remote_block_ids": [[2**70]]},
    {"remote_block_ids": [[-1]]},
    {"remote_engine_id": "\ud800"},
    {"remote_engine_id": "x" * 1025},
    {"remote_seal": "x" * 129},
    {"prefill_result": {"first_token": -1}},
    {"prefill_result": {"first_token": 2**31}},
    {"prefill_result": {"first_token": 1, "seed": 2**64}},
    {"prefill_result": {"first_token": 1, "logprobs": [1, float("nan"), 1, {}]}},
    {"prefill_result": {"first_token": 1, "logprobs": [1, -1.0, 1, dict.fromkeys(range(1025), -1.0)]}},
    {"prefill_result": {"first_token": 1, "logprobs": [1, -1.0, 1, {2**70: -1.0}]}},
    {"prefill_result": {"first_token": 1, "timeline": {"arrived": float("nan")}}},
    {"prefill_result": {"first_token": 1, "timeline": {"arrived": float("inf")}}},
]


@pytest.mark.parametrize(
    "fields", OUT_OF_BOUNDS, ids=lambda fields: str(fields)[:60].encode("ascii", "replace").decode()
)
def test_every_field_is_bounded_before_it_is_used(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        parse_hand_off({"do_remote_prefill": True, "transfer_id": "t", **fields}, "r")


def test_what_travels_stays_sealed() -> None:
    ticket = TicketSealer("ours").seal(make_ticket(remote_ranks=[("a", 1), ("b", 2)], tp_size=2), 30.0)
    as_json = msgspec.json.decode(msgspec.json.encode(ticket.to_params()))
    hand_off = parse_hand_off(as_json, "r")
    assert isinstance(hand_off, Consume)
    assert TicketSealer("ours").refusal(hand_off.ticket) is None
