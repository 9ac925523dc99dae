"""Reads one choice's text with an output parser: numbers its calls, and drops what the client does not get."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import msgspec

from kvferry.engine.server.output_parsers.base import CallArguments, OutputParser, ParsedCall, ParsedOutput, ParsedText


class NumberedCall(msgspec.Struct, frozen=True):
    """A call, with its position among the choice's calls; or the next chunk of its arguments, without id and name."""

    index: int
    id: str
    name: str
    arguments: str


AnswerPart = ParsedText | NumberedCall


def join_calls(chunks: Iterable[NumberedCall]) -> list[NumberedCall]:
    """The calls that consist of these chunks."""
    groups = [list(group) for _, group in groupby(chunks, key=lambda chunk: chunk.index)]
    return [
        msgspec.structs.replace(group[0], arguments="".join([chunk.arguments for chunk in group])) for group in groups
    ]


@dataclass(frozen=True)
class CallIds:
    """The ids of one choice's calls: functions of `key` and the position, so that they are the same on each instance.
    `is_short`: nine letters and digits."""

    key: bytes
    is_short: bool = False
    letters: ClassVar[str] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

    def of(self, index: int) -> str:
        """The id of a call."""
        digest = hashlib.sha256(index.to_bytes(8, "little") + self.key).digest()
        if not self.is_short:
            return f"chatcmpl-tool-{digest.hex()[:32]}"
        return "".join(self.letters[byte % len(self.letters)] for byte in digest[:9])


class AnswerReader:
    """Divides one choice's text into reasoning, content and calls. `may_call`: it may have calls, and whitespace alone
    before, between or after them is no content. `max_calls`: the choice ends after as many."""

    max_id: ClassVar[int] = 256
    """Longest id of the model's own that is used."""

    def __init__(
        self, parser: OutputParser, ids: CallIds, *, may_call: bool = True, max_calls: int | None = None
    ) -> None:
        self._parser = parser
        self._ids = ids
        self._max_calls = max_calls
        self._used_ids: set[str] = set()
        self._has_open_call = False
        self._holds_spaces = may_call
        """True before the first text, and after a call."""
        self._spaces = ""
        """Whitespace that is content only if text follows."""

    @property
    def has_calls(self) -> bool:
        """True if the text so far has calls."""
        return bool(self._used_ids)

    @property
    def has_open_call(self) -> bool:
        """True if the text so far ends within the arguments of a call that is passed on."""
        return self._has_open_call

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._parser.is_reasoning

    @property
    def is_complete(self) -> bool:
        """True if no further call is permitted."""
        return len(self._used_ids) == self._max_calls and not self._has_open_call

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that `text` completes."""
        return [] if self.is_complete or not text else self._read(self._parser.feed(text))

    def finish(self) -> list[AnswerPart]:
        """The rest, at the end of the text."""
        if self.is_complete:
            return []
        rest = self._read(self._parser.finish())
        if self._spaces and not self.has_calls:
            rest.append(ParsedText("content", self._spaces))
        return rest

    def _read(self, parts: Iterable[ParsedOutput]) -> list[AnswerPart]:
        read: list[AnswerPart] = []
        for part in parts:
            if self.is_complete:
                break
            if isinstance(part, ParsedCall):
                read.append(self._numbered(part))
                self._holds_spaces, self._spaces, self._has_open_call = True, "", part.is_open
            elif isinstance(part, CallArguments):
                read.append(NumberedCall(len(self._used_ids) - 1, "", "", part.text))
                self._has_open_call = not part.is_last
            elif part.kind == "content" and self._holds_spaces and not part.text.strip():
                self._spaces += part.text
            elif part.kind == "content":
                read.append(ParsedText("content", self._spaces + part.text))
                self._holds_spaces, self._spaces = False, ""
            else:
                read.append(part)
        return read

    def _numbered(self, call: ParsedCall) -> NumberedCall:
        index = len(self._used_ids)
        is_usable = call.id is not None and call.id not in self._used_ids and len(call.id) <= self.max_id
        call_id = call.id if is_usable and call.id is not None else self._ids.of(index)
        self._used_ids.add(call_id)
        return NumberedCall(index, call_id, call.name, call.arguments)
