"""Bodies are edited without touching what is not edited."""

from __future__ import annotations

import pytest

from kvferry.router.body import RequestBody

ODD = b'{"big": 123456789012345678901234567890, "float": 1.10, "text": "\\u00e9", "null": null, "twice": 1 }'


def parsed(data: bytes) -> RequestBody:
    body = RequestBody.parse(data)
    assert body is not None
    return body


def test_nothing_changed_is_the_very_bytes() -> None:
    assert parsed(ODD).encode() is ODD
    assert parsed(ODD).encode(without=("not there",)) is ODD


def test_other_fields_keep_their_bytes() -> None:
    encoded = parsed(ODD).encode(without=("twice",), added={"deep": [1]})
    assert encoded == (
        b'{"big":123456789012345678901234567890,"float":1.10,"text":"\\u00e9","null":null,"added":{"deep":[1]}}'
    )


def test_reading_fields() -> None:
    body = parsed(ODD)
    assert (body.get("float"), body.get("text"), body.get("null"), body.get("missing")) == (1.1, "é", None, None)
    assert body.raw("float") == b"1.10"
    assert body.raw("missing") == b""
    assert "null" in body
    assert "missing" not in body


@pytest.mark.parametrize("data", [b"", b"[1]", b'"text"', b"{", b"\xff\xfe", b"null"])
def test_what_is_no_object_is_none(data: bytes) -> None:
    assert RequestBody.parse(data) is None
