"""Tickets in the answers of prefill instances: whose they are, and what is added."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import ProtocolError
from kvferry.router.protocols.form import Form


def form(**fields: Any) -> Form:
    return Form(protocol="p", transfer_id="t", produce={}, **fields)


def answer(params: Any) -> bytes:
    return json.dumps({"id": "x", "kv_transfer_params": params}).encode()


def read(made: Form, content: bytes, *, from_kvferry: bool = False) -> Any:
    ticket = made.read_ticket(content, from_kvferry=from_kvferry)
    return None if ticket is None else json.loads(bytes(ticket))


def test_a_ticket_of_kvferrys_is_passed_on_as_it_is() -> None:
    params = {"transfer_id": "t", "host": "h", "number": 2**60}
    assert read(form(), answer(params), from_kvferry=True) == params


@pytest.mark.parametrize("content", [answer(None), answer({}), b"{}"])
def test_an_answer_may_have_none(content: bytes) -> None:
    assert read(form(), content, from_kvferry=True) is None


def test_another_engines_ticket_gets_the_transfer_id() -> None:
    assert read(form(), answer({"remote_host": "h"})) == {"remote_host": "h", "transfer_id": "t"}


@pytest.mark.parametrize(
    ("params", "from_kvferry"), [({"transfer_id": "u"}, True), ({"transfer_id": "u"}, False), ({"x": 1}, True)]
)
def test_a_ticket_of_another_hand_off_is_refused(params: dict[str, Any], from_kvferry: bool) -> None:
    with pytest.raises(ProtocolError, match="another hand-off"):
        read(form(), answer(params), from_kvferry=from_kvferry)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"kv_transfer_params":[1]}', b'{"kv_transfer_params":"x"}', b"\xff"])
def test_what_is_no_ticket_is_refused(content: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read(form(), content)


def test_a_ticket_that_was_known_before_stays() -> None:
    early = {"host": "h"}
    assert read(form(early=early, early_is_final=True), answer({"other": 1})) == early
