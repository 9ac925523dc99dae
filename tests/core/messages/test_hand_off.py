import msgspec
import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import (
    Consume,
    PrefillResult,
    Produce,
    Ticket,
    TokenLogprobs,
    parse_hand_off,
    prefix_digests,
)
from kvferry.core.messages.timeline import Timeline

VLLM_PRODUCE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_no_params_is_no_hand_off() -> None:
    assert parse_hand_off(None, "r") is None
    assert parse_hand_off({}, "r") is None
    assert parse_hand_off({"do_remote_decode": False}, "r") is None


def test_the_request_of_vllms_proxy_is_understood() -> None:
    assert parse_hand_off(VLLM_PRODUCE, "r1") == Produce(transfer_id="r1")


def test_a_ticket_survives_json() -> None:
    ticket = Ticket(
        transfer_id="t",
        remote_host="127.0.0.1",
        remote_port=5,
        remote_block_ids=[[3, 4]],
        prefill_result=PrefillResult(
            first_token=7,
            seed=2**63 + 1,
            logprobs=TokenLogprobs(7, -0.5, 1, {7: -0.5, 9: -1.25}),
            timeline=Timeline(arrived=1.5),
        ),
    )
    params = msgspec.json.decode(msgspec.json.encode(ticket.to_params()))
    assert params["do_remote_prefill"] is True
    assert parse_hand_off(params, "r") == Consume(ticket)


def test_keys_of_others_are_left_alone() -> None:
    params = {"do_remote_prefill": True, "transfer_mode": "read", "dcp_size": 1, "remote_request_id": "abc"}
    hand_off = parse_hand_off(params, "r")
    assert isinstance(hand_off, Consume)
    assert hand_off.ticket.transfer_id == "abc"


def test_both_directions_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        parse_hand_off({"do_remote_decode": True, "do_remote_prefill": True}, "r")


@pytest.mark.parametrize("bad", [{"remote_port": "x"}, {"remote_block_ids": 5}, {"transfer_id": []}])
def test_wrong_kinds_name_the_field(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        parse_hand_off({"do_remote_prefill": True, **bad}, "r")


def test_a_ticket_of_several_ranks_survives_json() -> None:
    ticket = Ticket(transfer_id="t", remote_host="a", remote_port=5, tp_size=2, remote_ranks=[("a", 5), ("b", 6)])
    params = msgspec.json.decode(msgspec.json.encode(ticket.to_params()))
    assert params["remote_ranks"] == [["a", 5], ["b", 6]]
    hand_off = parse_hand_off(params, "r")
    assert hand_off == Consume(ticket)
    assert list(ticket.addresses) == [("a", 5), ("b", 6)]


def test_the_keys_of_one_rank_are_enough() -> None:
    ticket = Ticket(transfer_id="t", remote_host="a", remote_port=5)
    assert list(ticket.addresses) == [("a", 5)]
    assert ticket.to_params()["tp_size"] == 1


def test_a_decode_may_be_asked_to_keep_its_blocks() -> None:
    params = Ticket(transfer_id="t").to_params() | {"keep_for_next_turn": True}
    assert parse_hand_off(params, "r") == Consume(Ticket(transfer_id="t"), keep=True)


KEPT = {
    **VLLM_PRODUCE,
    "remote_host": "d",
    "remote_port": 7,
    "remote_transfer_id": "kept",
    "remote_num_tokens": 9,
    "remote_request_id": "turn-1",
}


def test_a_prefill_may_begin_with_what_a_decode_kept() -> None:
    hand_off = parse_hand_off({**KEPT, "transfer_id": "t2"}, "r")
    assert isinstance(hand_off, Produce)
    assert hand_off.transfer_id == "t2"
    assert hand_off.source is not None
    assert (hand_off.source.transfer_id, hand_off.source.remote_host) == ("kept", "d")


def test_its_own_hand_off_has_a_name_of_its_own() -> None:
    hand_off = parse_hand_off(KEPT, "r")
    assert isinstance(hand_off, Produce)
    assert hand_off.transfer_id == "r"


def test_a_ticket_knows_what_its_tokens_begin_with() -> None:
    tokens = [5, 6, 7, 8, 9]
    ticket = Ticket(transfer_id="t", remote_prefixes=prefix_digests(tokens, [2, 4, 5]))
    assert ticket.common_prefix([*tokens, 1]) == 5
    assert ticket.common_prefix([5, 6, 7, 8, 1, 1]) == 4
    assert ticket.common_prefix([5, 6, 7]) == 2
    assert ticket.common_prefix([5]) == 0
    assert ticket.common_prefix([1, *tokens]) == 0
    assert Ticket(transfer_id="t").common_prefix(tokens) == 0


def test_prefixes_that_make_no_sense_match_nothing() -> None:
    ticket = Ticket(transfer_id="t", remote_prefixes=[(0, ""), (-3, "x"), (2, "x"), (2, "y"), (99, "z")])
    assert ticket.common_prefix([1, 2, 3]) == 0


@pytest.mark.parametrize("bad", [{"remote_ranks": [["a"]]}, {"remote_ranks": "a"}, {"remote_prefixes": [5]}])
def test_wrong_kinds_of_kvferry_s_own_keys_name_the_field(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        parse_hand_off({"do_remote_prefill": True, **bad}, "r")


def test_a_ticket_says_whether_it_is_of_a_prompt() -> None:
    tokens = [5, 6, 7]
    ticket = Ticket(transfer_id="t", remote_num_tokens=3, remote_prefixes=prefix_digests(tokens, [3]))
    assert ticket.is_of(tokens)
    assert not ticket.is_of([5, 6, 8])
    assert not ticket.is_of([*tokens, 8])
    assert ticket.agrees_with([*tokens, 8])
    assert not ticket.agrees_with([8, *tokens])
    assert not ticket.agrees_with(tokens[:2])
    assert not ticket.is_of(tokens, "salt")
    salted = Ticket(transfer_id="t", remote_num_tokens=3, remote_prefixes=prefix_digests(tokens, [2, 3], "salt"))
    assert salted.is_of(tokens, "salt")
    assert [salted.common_prefix(tokens, salt) for salt in ("salt", "", "Salt")] == [3, 0, 0]
    unknown = Ticket(transfer_id="t")
    assert unknown.is_of(tokens)
    assert unknown.agrees_with(tokens)
