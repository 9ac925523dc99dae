"""A parser of tool calls in a format of its own: `[[get_weather {"city": "Bern"}]]`.

kvferry serve MODEL --tool-call-parser bracket_calls:BracketCalls
"""

from __future__ import annotations

import json

from kvferry.engine.server.output_parsers.base import OutputParser, ParsedCall, ParsedOutput, ParsedText, ParserContext

OPEN, CLOSE = "[[", "]]"


class BracketCalls(OutputParser):
    """Holds text from `[[` on until it is a call."""

    def __init__(self, context: ParserContext) -> None:
        self._held = ""

    def feed(self, text: str) -> list[ParsedOutput]:
        """Content up to what may begin a call, and the calls that are complete."""
        self._held += text
        parts: list[ParsedOutput] = []
        while (begin := self._held.find(OPEN)) >= 0:
            parts += self._content(begin)
            call = self._call()
            if call is None:
                return parts
            parts.append(call)
        parts += self._content(len(self._held) - self._held.endswith(OPEN[0]))
        return parts

    def finish(self) -> list[ParsedOutput]:
        """What was held is no call: it is content."""
        return self._content(len(self._held))

    def _content(self, end: int) -> list[ParsedOutput]:
        text, self._held = self._held[:end], self._held[end:]
        return [ParsedText("content", text)] if text else []

    def _call(self) -> ParsedOutput | None:
        """The call at the beginning of the held text; None: it is not complete. `]]` may occur in its arguments too."""
        name, _, rest = self._held.removeprefix(OPEN).partition(" ")
        end = rest.find(CLOSE)
        while end >= 0:
            try:
                arguments = json.loads(rest[:end])
            except (ValueError, RecursionError):
                end = rest.find(CLOSE, end + 1)
                continue
            if not isinstance(arguments, dict) or not name:
                break
            self._held = rest[end + len(CLOSE) :]
            return ParsedCall(name, json.dumps(arguments))
        return None
