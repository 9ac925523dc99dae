"""The model of settings: fields, their help, their documents, and secrets that are not shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import Count
from kvferry.core.settings.model import (
    COMMON,
    SECRET,
    Settings,
    alias,
    changed,
    decode,
    encode,
    field_help,
    heading,
    settings_fields,
)


class Base(Settings, frozen=True, kw_only=True):
    number: Annotated[Count, heading("Numbers"), alias("n")] = 3
    """How many
    there are."""


class Example(Base, frozen=True, kw_only=True):
    key: Annotated[str, SECRET, COMMON] = ""
    """The key."""
    folder: Path | None = None


def test_fields_have_what_their_annotations_say() -> None:
    number, key, folder = settings_fields(Example)
    assert (number.name, number.default, number.heading, number.alias) == ("number", 3, "Numbers", "n")
    assert (key.secret, key.common, folder.secret) == (True, True, False)
    assert not number.required


def test_help_is_the_docstring_under_a_field_also_of_bases() -> None:
    assert field_help(Example) == {"number": "How many there are.", "key": "The key."}


def test_only_what_was_changed_is_written() -> None:
    assert changed(Example()) == {}
    settings = Example(number=4, key="k", folder=Path("/x"))
    assert changed(settings) == {"number": 4, "key": "k", "folder": "/x"}
    assert changed(settings, without=("key",)) == {"number": 4, "folder": "/x"}


def test_a_document_is_read_again() -> None:
    settings = Example(number=4, folder=Path("/x"))
    assert decode(encode(settings), Example) == settings


@pytest.mark.parametrize("content", [b"", b"[]", b'{"nummer":1}', b'{"number":"x"}', b'{"folder":3}'])
def test_another_document_is_refused(content: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(content, Example)


@pytest.mark.parametrize("value", [3, True, [], {"a": 1}])
def test_a_path_must_be_text(value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"expected a path as text, got .*folder"):
        decode(msgspec.json.encode({"folder": value}), Example)


def test_a_number_out_of_bounds_is_refused_however_it_comes() -> None:
    with pytest.raises(ConfigError, match="--number must be at least 1"):
        Example(number=0)
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        decode(b'{"number":0}', Example)


def test_secrets_are_not_shown() -> None:
    assert repr(Example(key="sk-1")) == "Example(number=3, folder=None)"
