"""JSON that two parsers cannot read in two ways."""

from __future__ import annotations

import pytest

from kvferry.api.strict import MAX_DEPTH, is_integers, read_object, read_texts, unpaired_surrogate
from kvferry.core.errors import InvalidRequest


def test_an_object_is_read() -> None:
    assert read_object(b'{"a": [1, {"b": "x:y"}], "c": "\\u00e9"}') == {"a": [1, {"b": "x:y"}], "c": "\u00e9"}
    assert read_object(b"{}") == {}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a":1,"a":2}', "a"),
        (b'{"a":{"b":1,"b":2}}', "b"),
        (b'{"a":NaN}', "JSON"),
        (b'{"a":"\xff"}', "not UTF-8: byte 6"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "deep"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"a":1} x', "not valid JSON"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_object(data)


def test_names_may_be_refused_within_objects_only() -> None:
    assert read_object(b'{"model":1}', ["model"]) == {"model": 1}
    with pytest.raises(InvalidRequest, match="model"):
        read_object(b'{"a":[{"model":1}]}', ["model"])


def test_texts_of_fields_keep_duplicates() -> None:
    fields = read_texts(b'{"a":1,"b": [1, 2],"a":"x"}')
    assert [(name, bytes(text)) for name, text in fields] == [("a", b"1"), ("b", b"[1, 2]"), ("a", b'"x"')]


@pytest.mark.parametrize("text", [b"[]", b"[1]", b"[ 1,\t-2\n, 345 ]", b"[" + b"9" * 18 + b"]"])
def test_lists_of_short_integers_are_told(text: bytes) -> None:
    assert is_integers(text)


@pytest.mark.parametrize("text", [b"1", b'["a"]', b"[1.5]", b"[[1]]", b"[1e5]", b"[" + b"9" * 19 + b"]", b"[null]"])
def test_other_lists_are_not(text: bytes) -> None:
    assert not is_integers(text)


def test_an_unpaired_surrogate_is_found() -> None:
    assert unpaired_surrogate(b'{"a":"\\ud83d\\ude00"}') is None
    assert unpaired_surrogate(b"{") is None
    assert isinstance(unpaired_surrogate(b'{"a":["\\udc00"]}'), InvalidRequest)
