"""Prompts from files, lines and standard input."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvferry.cli.cache.documents import Document, read_documents
from kvferry.core.errors import ConfigError


def test_a_file_is_a_prompt_and_a_line_a_request(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("Hello\n")
    lines.write_text('{"prompt": [1, 2]}\n\n{"messages": [], "model": "m"}')
    assert [*read_documents([str(text), str(lines)])] == [
        Document(str(text), {"prompt": "Hello\n"}),
        Document(f"{lines}:1", {"prompt": [1, 2]}),
        Document(f"{lines}:3", {"messages": [], "model": "m"}),
    ]


def test_standard_input_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    assert [*read_documents(["-"])] == [Document("standard input", {"prompt": "typed"})]
    with pytest.raises(ConfigError, match="only once"):
        read_documents(["-", "-"])


@pytest.mark.parametrize(
    ("path", "says"), [("missing.txt", "no file"), ("--wrong", "neither a flag"), (".", "no file")]
)
def test_what_is_no_file_is_named_before_anything_is_read(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{path} is {says}"):
        read_documents([path])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "b.jsonl:1 is not a JSON object"),
        (b"[1]", "b.jsonl:1 is not a JSON object"),
        (b"{}", "must have either prompt"),
        (b'{"prompt": "a", "messages": []}', "must have either prompt"),
        (b'{"prompt": "\xff"}', "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_bytes(line)
    with pytest.raises(ConfigError, match=says):
        [*read_documents([str(path)])]


def test_a_text_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text: .* at byte 2"):
        [*read_documents([str(path)])]
