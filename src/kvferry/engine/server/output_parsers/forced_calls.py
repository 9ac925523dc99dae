"""Parses answers that a grammar has constrained to calls (`engine.structured.answer_grammar`).

Their text has one form. So a call begins as soon as its name is complete, and arguments that are a JSON object are
passed on as they come, without a change. Arguments in tags are passed on one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from kvferry.core.structured_outputs import NUMBER, CallForm
from kvferry.engine.server.output_parsers.base import CallArguments, OutputParser, ParsedCall, ParsedOutput, ParsedText

_CHARACTER = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonObjectScanner:
    """Finds the end of a JSON object that comes in chunks. Valid JSON is assumed."""

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


class TaggedArguments:
    """Reads arguments in tags as a JSON object, one by one. `tags`: as `CallForm.parameter`; `end`: what follows the
    last one; `texts`: the names of arguments that are texts, where all others are JSON."""

    def __init__(self, tags: tuple[str, str, str], end: str, texts: Collection[str]) -> None:
        before, between, self._close = tags
        self._open = re.compile(re.escape(before) + r"(?P<key>[^<>\s]+)" + re.escape(between))
        self._end, self._texts = end, texts
        self._held = ""
        self._num_read = self._num_searched = 0

    def feed(self, text: str) -> tuple[str, str | None]:
        """The JSON text that `text` completes, and the text after the end of the arguments; None: they go on."""
        self._held += text
        written = ""
        while True:
            if self._held.startswith(self._end):
                return written + ("}" if self._num_read else "{}"), self._held[len(self._end) :]
            opening = self._open.match(self._held)
            if opening is None:
                return written, None
            close = self._held.find(self._close, max(opening.end(), self._num_searched))
            if close < 0:
                self._num_searched = max(0, len(self._held) - len(self._close))
                return written, None
            self._num_searched = 0
            value = self._held[opening.end() : close]
            value = json.dumps(value, ensure_ascii=False) if opening["key"] in self._texts else value
            written += (", " if self._num_read else "{") + json.dumps(opening["key"], ensure_ascii=False) + f": {value}"
            self._num_read, self._held = self._num_read + 1, self._held[close + len(self._close) :]


class JsonArguments:
    """Passes a JSON object on."""

    def __init__(self) -> None:
        self._scanner = JsonObjectScanner()

    def feed(self, text: str) -> tuple[str, str | None]:
        """The object's part of `text`, and the text after the object's end; None: it goes on."""
        end = self._scanner.feed(text)
        return (text, None) if end is None else (text[:end], text[end:])


class ForcedCallParser(OutputParser):
    """Parses one answer of calls. `texts`: the functions that may be called, each with the names of its arguments that
    are texts, where arguments are in tags. Text of another form, which a grammar does not permit, is content."""

    max_header = 4096
    """Characters before the arguments of a call, at most."""

    def __init__(self, form: CallForm, texts: Mapping[str, Collection[str]]) -> None:
        before, between, after = form.call
        self._form, self._texts, names = form, texts, list(texts)
        name = f"(?P<name>{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})"
        tail = re.escape(before) + name + re.escape(between).replace(re.escape(NUMBER), r"(?P<number>\d+)")
        tail += r"(?=\{)" if form.parameter is None else ""
        lead = f"(?:{re.escape(form.lead)})?" if form.lead else ""
        self._first = re.compile(r"\s*" + lead + re.escape(form.begin) + tail)
        ending = after if form.parameter is None else ""  # arguments in tags end with it
        self._next = re.compile(re.escape(ending + form.separator) + tail)
        self._held = ""
        """Text that may be the header of a call."""
        self._arguments: JsonArguments | TaggedArguments | None = None
        """None: no call is open."""
        self._has_called = self._is_content = False

    def feed(self, text: str) -> list[ParsedOutput]:
        """The parts that `text` adds: the beginning of a call, and text of its arguments."""
        if self._is_content:
            return [ParsedText("content", text)] if text else []
        parts: list[ParsedOutput] = []
        while True:
            if self._arguments is None:
                self._held, text = "", self._held + text
                header = (self._next if self._has_called else self._first).match(text)
                if header is None:
                    return [*parts, *self._hold(text)]
                parts.append(self._begin(header))
                self._arguments, text = self._new_arguments(header["name"]), text[header.end() :]
            arguments, rest = self._arguments.feed(text)
            if arguments:
                parts.append(CallArguments(arguments, is_last=rest is not None))
            if rest is None:
                return parts
            self._arguments, text = None, rest

    def finish(self) -> list[ParsedOutput]:
        """The rest: the beginning of a first call as content. A further call without its header is dropped."""
        held, self._held = self._held, ""
        return [ParsedText("content", held)] if held and not self._has_called else []

    def _begin(self, header: re.Match[str]) -> ParsedCall:
        self._has_called = True
        name, call_id = header["name"], None
        if self._form.call_id:
            call_id = self._form.call_id.format(name=name, number=header["number"])
        return ParsedCall(name, "", call_id, is_open=True)

    def _new_arguments(self, name: str) -> JsonArguments | TaggedArguments:
        tags = self._form.parameter
        return JsonArguments() if tags is None else TaggedArguments(tags, self._form.call[2], self._texts[name])

    def _hold(self, text: str) -> list[ParsedOutput]:
        if len(text) <= self.max_header:
            self._held = text
            return []
        self._is_content = True
        return [ParsedText("content", text)]
