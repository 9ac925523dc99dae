"""Parses answers that a grammar has constrained to calls (`engine.structured.answer_grammar`).

Their text has one form, and their arguments are JSON. So a call begins as soon as its name is complete, and its
arguments are passed on as they come, without a change.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from kvferry.core.structured_outputs import NUMBER, CallForm
from kvferry.engine.server.output_parsers.base import CallArguments, OutputParser, ParsedCall, ParsedText, Part

_CHARACTER = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonObjectScanner:
    """Finds the end of a JSON object that comes in pieces. Valid JSON is assumed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """The index in `text` after the object's end; None: it goes on."""
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped, position = False, position + 1
                continue
            match = (_IN_STRING if self._in_string else _CHARACTER).search(text, position)
            if match is None:
                return None
            position, character = match.end(), match[0]
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                self._is_escaped = True
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return position
        return None


class ForcedCallParser(OutputParser):
    """Parses one answer of calls. `names`: the functions that may be called. Text that is not of the form, which a
    grammar does not permit, is content."""

    max_header = 4096
    """Characters before the arguments of a call, at most."""

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        before, between, _ = form.call
        self._form = form
        name = f"(?P<name>{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})"
        tail = re.escape(before) + name + re.escape(between).replace(re.escape(NUMBER), r"(?P<number>\d+)") + r"(?=\{)"
        lead = f"(?:{re.escape(form.lead)})?" if form.lead else ""
        self._first = re.compile(r"\s*" + lead + re.escape(form.begin) + tail)
        self._next = re.compile(re.escape(form.call[2] + form.separator) + tail)
        self._held = ""
        """Text that may be the header of a call."""
        self._scanner: JsonObjectScanner | None = None
        """None: no call is open."""
        self._has_called = self._is_content = False

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` adds: the beginning of a call, and text of its arguments."""
        if self._is_content:
            return [ParsedText("content", text)] if text else []
        parts: list[Part] = []
        while True:
            if self._scanner is None:
                self._held, text = "", self._held + text
                header = (self._next if self._has_called else self._first).match(text)
                if header is None:
                    return [*parts, *self._hold(text)]
                parts.append(self._begin(header))
                self._scanner, text = JsonObjectScanner(), text[header.end() :]
            end = self._scanner.feed(text)
            arguments = text if end is None else text[:end]
            if arguments:
                parts.append(CallArguments(arguments, is_last=end is not None))
            if end is None:
                return parts
            self._scanner, text = None, text[end:]

    def finish(self) -> list[Part]:
        """The rest: the beginning of a first call as content. A further call without its header is dropped."""
        held, self._held = self._held, ""
        return [ParsedText("content", held)] if held and not self._has_called else []

    def _begin(self, header: re.Match[str]) -> ParsedCall:
        self._has_called = True
        name, call_id = header["name"], None
        if self._form.call_id:
            call_id = self._form.call_id.format(name=name, number=header["number"])
        return ParsedCall(name, "", call_id, is_open=True)

    def _hold(self, text: str) -> list[Part]:
        if len(text) <= self.max_header:
            self._held = text
            return []
        self._is_content = True
        return [ParsedText("content", text)]
