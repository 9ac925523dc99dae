"""Bodies are edited without touching what is not edited."""

from __future__ import annotations

import re

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.router.body import RequestBody

ODD = b'{"big": 123456789012345678901234567890, "float": 1.10, "text": "\\u00e9", "null": null, "twice": 1 }'


def parsed(data: bytes) -> RequestBody:
    return RequestBody.parse(data)


def test_nothing_changed_is_the_very_bytes() -> None:
    assert parsed(ODD).encode() is ODD
    assert parsed(ODD).encode(without=("not there",)) is ODD


def test_other_fields_keep_their_bytes() -> None:
    encoded = parsed(ODD).encode(without=("twice",), added={"deep": [1]})
    assert encoded == (
        b'{"big":123456789012345678901234567890,"float":1.10,"text":"\\u00e9","null":null,"added":{"deep":[1]}}'
    )


def test_a_long_list_of_integers_keeps_its_bytes() -> None:
    prompt = b"[" + b"-1, 22," * 100 + b" 333]"
    data = b'{"n": 1, "prompt": ' + prompt + b', "stream": true}'
    body = parsed(data)
    assert body.raw("prompt") == prompt
    assert body.get("prompt") == [-1, 22] * 100 + [333]
    assert (body.get("n"), body.get("stream")) == (1, True)
    assert body.encode() is data


def test_reading_fields() -> None:
    body = parsed(ODD)
    assert (body.get("float"), body.get("text"), body.get("null"), body.get("missing")) == (1.1, "é", None, None)
    assert body.raw("float") == b"1.10"
    assert body.raw("missing") == b""
    assert "null" in body
    assert "missing" not in body


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "not valid JSON"),
        (b"\xff\xfe", "not UTF-8: byte 0"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"\xff": 1}', "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "not valid JSON"),
        ('{"a": 1}'.encode("utf-32-be"), "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is listed twice"),
        (b'{"a": {"b": [{"c": 1, "\\u0063": 2}]}}', "'c' is listed twice"),
        (b'{"a": "\\ud800"}', "a has the character \\ud800, half of a surrogate pair"),
        (b'{"a": ["\\udc00\\ud800"]}', "a[0] has the character \\udc00"),
        (b'{"\\uDFFF": 1}', "surrogate"),
        (b'{"a": "a\x00b"}', "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": [' + b"1," * 500 + b"1" * 5000 + b"]}", "not valid JSON"),
        (b'{"a": [' + b"1," * 500 + b"01]}", "not valid JSON"),
        (b'{"a": [' + b"1," * 500 + b"1], " + b'"b": 1, "\\u0062": 2}', "'b' is listed twice"),
        (b'{"a": [' + b"1," * 500 + b"1], " + b'"b": {"c": 1, "\\u0063": 2}}', "'c' is listed twice"),
        (b'{"a": [' + b"1," * 500 + b"1], " + b'"b": "\\ud800"}', "surrogate"),
        (b'{"a": [' + b"1," * 500 + b'{"b": 1, "b": 2}]}', "'b' is listed twice"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "64 levels"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "64 levels"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "64 levels"),
        (b'{"a": {"kv_transfer_params": {}}}', "not accepted from clients"),
        (b'{"vllm_xargs": {"kv_transfer\\u005fparams": {}}}', "not accepted from clients"),
        (b'{"a": [[{"ec_transfer_params": 1}]]}', "not accepted from clients"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        RequestBody.parse(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\\\\ud800 as text"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
        '{"é": "日本語"}'.encode(),
        b'{"a": {"b": 1}, "c": {"b": 1}}',
    ],
)
def test_what_can_be_read_in_one_way_only_is_kept(data: bytes) -> None:
    assert parsed(data).encode() is data


@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "kv_transfer_param\\u0073", "ec_transfer_params", "bootstrap_host"]
)
def test_a_ticket_of_a_client_is_left_out_unless_clients_are_trusted(name: str) -> None:
    data = b'{"a": 1.0, "%b": {"remote_host": "evil"}}' % name.encode()
    assert parsed(data).encode() == b'{"a":1.0}'
    assert RequestBody.parse(data, trust_tickets=True).encode() is data


@pytest.mark.parametrize("value", [b"false", b"1", b'"ticket"', b"[]"])
def test_a_ticket_that_is_no_object_is_told_of(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="kv_transfer_params must be an object or null"):
        parsed(b'{"kv_transfer_params": ' + value + b"}")
