"""Texts in messages are short."""

from __future__ import annotations

import pytest

from kvferry.core.text import shortened


@pytest.mark.parametrize(
    ("text", "expected"), [("", ""), ("abc", "abc"), ("abcd", "abcd"), ("abcde", "abc…"), ("é" * 9, "ééé…")]
)
def test_a_text_has_at_most_so_many_characters(text: str, expected: str) -> None:
    assert shortened(text, 4) == expected
