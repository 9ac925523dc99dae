"""JSON with one meaning only."""

from __future__ import annotations

import pytest

from kvferry.core.strict_json import STRICT, find_surrogate


def test_ordinary_json_is_read() -> None:
    assert STRICT.decode('{"a": [1, 1.5, null, true], "b": {"a": 1}}') == {"a": [1, 1.5, None, True], "b": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "'a' is listed twice"),
        ('[{"x": {"b": 1, "c": 2, "b": 3}}]', "'b' is listed twice"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[1e400]", "1e400 is out of range"),
        ("[-1e999]", "out of range"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
def test_what_has_no_one_meaning_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        STRICT.decode(text)


def test_a_long_name_is_quoted_in_part() -> None:
    name = "x" * 1000
    with pytest.raises(ValueError, match="listed twice") as caught:
        STRICT.decode(f'{{"{name}": 1, "{name}": 2}}')
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("a\U0001f600", None),
        ({"a": ["x", {"b": 1}]}, None),
        ("\ud800", ("", "\\ud800")),
        ({"messages": [{"content": "\udc00"}]}, ("messages[0].content", "\\udc00")),
        ({"\ud800": 1}, ("the name of a field", "\\ud800")),
        ({"a": {"\ud801": 1}}, ("a name in a", "\\ud801")),
        ([["ok"], ["\ud800", "\ud801"]], ("[1][0]", "\\ud800")),
    ],
)
def test_a_surrogate_that_stands_alone_is_found(value: object, place: tuple[str, str] | None) -> None:
    assert find_surrogate(value) == place


def test_depth_is_no_problem() -> None:
    deep: object = "\ud800"
    for _ in range(100_000):
        deep = [deep]
    found = find_surrogate(deep)
    assert found is not None
    assert found[0].startswith("[0][0]")
