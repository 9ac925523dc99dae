"""The documents of `kvferry cache warm`: text files, standard input, and .jsonl files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import read_whole

MAX_LINE = 256 * 2**20
"""Maximum bytes of one line of a .jsonl file."""
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Document:
    """A document. `body`: a body of a request to /tokenize, with `prompt` or `messages`."""

    name: str
    body: dict[str, Any]


def read_documents(paths: Sequence[str]) -> Iterator[Document]:
    """Each file, or `-`, is one text; a .jsonl file has one request with `prompt` or `messages` on each line.

    Standard input is read at once, files when they are needed. Raises `ConfigError`, which names the file and the line;
    for missing files, at once.
    """
    if paths.count(STANDARD_INPUT) > 1:
        raise ConfigError("standard input (-) can be given only once")
    for path in paths:
        if path != STANDARD_INPUT and not Path(path).is_file():
            problem = "neither a flag of this command nor a file" if path.startswith("-") else "no file"
            raise ConfigError(f"{path} is {problem} that can be read")
    return _documents(paths, _read_text(STANDARD_INPUT) if STANDARD_INPUT in paths else "")


def _documents(paths: Sequence[str], standard_input: str) -> Iterator[Document]:
    for path in paths:
        if Path(path).suffix == ".jsonl":
            yield from _read_lines(path)
        elif path == STANDARD_INPUT:
            yield Document("standard input", {"prompt": standard_input})
        else:
            yield Document(path, {"prompt": _read_text(path)})


def _read_text(path: str) -> str:
    try:
        content = sys.stdin.buffer.read() if path == STANDARD_INPUT else read_whole(Path(path))
        return content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_lines(path: str) -> Iterator[Document]:
    try:
        with Path(path).open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if line.strip():
                    yield Document(f"{path}:{number}", _request_of(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _request_of(line: bytes, where: str) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not a JSON object: {error}") from error
    if ("prompt" in body) == ("messages" in body):
        raise ConfigError(f"{where} must have either prompt (a text or token ids) or messages")
    return body
