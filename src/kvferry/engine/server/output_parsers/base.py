"""The seam of output parsers: an answer's text, as it comes, becomes reasoning, content and tool calls.

A parser's state is a function of the text so far and of nothing else, so that it is the same on every instance, and
what it returns does not depend on how the text is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec


class ParsedText(msgspec.Struct, frozen=True):
    """Text for the client."""

    kind: Literal["content", "reasoning"]
    text: str


class ParsedCall(msgspec.Struct, frozen=True):
    """A call. `arguments`: a JSON object as text. `id`: the model's own, if its format has ids. `is_open`: arguments
    follow as `CallArguments`, which only a parser of calls that are certain to be readable may promise."""

    name: str
    arguments: str
    id: str | None = None
    is_open: bool = False


class CallArguments(msgspec.Struct, frozen=True):
    """The next chunk of the arguments of the call that is open."""

    text: str
    is_last: bool


ParsedOutput = ParsedText | ParsedCall | CallArguments
Part = ParsedOutput
"""Deprecated name of `ParsedOutput`."""


@dataclass(frozen=True)
class ParserContext:
    """The arguments of a parser. `prefix`: the beginning of the answer that the chat template has written. `tools`:
    the tools that may be called, as in the request."""

    prefix: str = ""
    tools: Sequence[dict[str, Any]] = ()


class OutputParser(ABC):
    """Parses one answer. No output of a model may raise: what cannot be parsed is content. Used on one thread."""

    def __init__(self, context: ParserContext) -> None:
        """The state before the answer's first character."""

    @classmethod
    def markers(cls) -> Sequence[str]:
        """Special tokens that the parser must see, which are hidden otherwise."""
        return ()

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends within reasoning."""
        return False

    @abstractmethod
    def feed(self, text: str) -> list[ParsedOutput]:
        """The outputs that `text` completes. Text that may begin a call is held until it is one, or is not."""

    @abstractmethod
    def finish(self) -> list[ParsedOutput]:
        """The rest, at the answer's end. Called once, and `feed` never after it."""


class Stages(OutputParser):
    """Two parsers: the content of the first is the second's text."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    @property
    def is_reasoning(self) -> bool:
        """True if the first's text ends within reasoning, or the second's does."""
        return self._first.is_reasoning or self._second.is_reasoning

    def feed(self, text: str) -> list[ParsedOutput]:
        """The outputs of both."""
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[ParsedOutput]:
        """The rest of both."""
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, parts: Sequence[ParsedOutput]) -> list[ParsedOutput]:
        passed: list[ParsedOutput] = []
        for part in parts:
            is_content = isinstance(part, ParsedText) and part.kind == "content"
            passed += self._second.feed(part.text) if is_content and isinstance(part, ParsedText) else [part]
        return passed
