"""The contract of `OutputParser`. In a package that provides one:

    from kvferry.testing.output_parser import OutputParserContract

    class TestMyParser(OutputParserContract):
        parser = "my_package.my_module:MyParser"
        answer = 'Let me see. CALL f({"a": 1})'
        calls = [("f", {"a": 1})]

For a parser of reasoning, set `kind` and `reasoning` instead. Needs pytest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest

from kvferry.core.errors import ConfigError
from kvferry.engine.parser_names import ParserKind, extension_point
from kvferry.engine.server.output_parsers.base import OutputParser, ParsedCall, ParsedOutput, ParsedText, ParserContext

_HOSTILE = (
    "",
    " \n",
    "{",
    "}",
    "<",
    "</",
    "[",
    '"',
    "\\",
    "\0",
    "\u2028",
    "{" * 2000,
    "<think>" * 50,
    "\n" * 5000,
    "日本語 🎉",
)


class OutputParserContract:
    """Set `parser`, an `answer` in its format, and what the client gets of it."""

    parser: ClassVar[str]
    kind: ClassVar[ParserKind] = "tools"
    answer: ClassVar[str]
    content: ClassVar[str] = ""
    reasoning: ClassVar[str] = ""
    calls: ClassVar[Sequence[tuple[str, dict[str, Any]]]] = ()
    tools: ClassVar[Sequence[dict[str, Any]]] = ()
    """The tools of the request."""

    def make(self) -> OutputParser:
        """A parser of one answer."""
        parser_class = extension_point(self.kind).find(self.parser, OutputParser)
        parser: OutputParser = parser_class(ParserContext(tools=self.tools))
        return parser

    def read(self, chunks: Iterable[str]) -> tuple[str, str, list[ParsedCall]]:
        """Content, reasoning and calls of an answer that comes in these chunks."""
        parser = self.make()
        parts: list[ParsedOutput] = [part for chunk in chunks for part in parser.feed(chunk)]
        parts += parser.finish()
        texts = {"content": "", "reasoning": ""}
        for part in parts:
            if isinstance(part, ParsedText):
                texts[part.kind] += part.text
        return texts["content"], texts["reasoning"], [part for part in parts if isinstance(part, ParsedCall)]

    def test_the_answer_is_read(self) -> None:
        """Content, reasoning and calls are the expected ones, and arguments are JSON objects."""
        content, reasoning, calls = self.read([self.answer])
        assert (content, reasoning) == (self.content, self.reasoning)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == list(self.calls)

    def test_the_parts_do_not_depend_on_how_the_text_is_cut(self) -> None:
        """Every cut in two, and each character by itself."""
        whole = self.read([self.answer])
        assert self.read(self.answer) == whole
        for cut in range(len(self.answer)):
            assert self.read([self.answer[:cut], "", self.answer[cut:]]) == whole, cut

    def test_an_answer_may_end_anywhere(self) -> None:
        """It ends wherever a stop string or `max_tokens` says, and does not raise."""
        for end in range(len(self.answer)):
            assert self.read([self.answer[:end]]) == self.read(self.answer[:end]), end

    @pytest.mark.parametrize("text", _HOSTILE, ids=range(len(_HOSTILE)))
    def test_no_text_raises(self, text: str) -> None:
        """Within a call or not, any text is read, and what is sent can be encoded."""
        for answer in (text, self.answer + text, text + self.answer, self.answer[: len(self.answer) // 2] + text):
            content, reasoning, calls = self.read([answer])
            "".join([content, reasoning, *(call.name + call.arguments for call in calls)]).encode()
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)

    def test_plain_text_is_content(self) -> None:
        """Text without anything of the format comes as it is."""
        text = "Zürich has 26 °C,\n\n and some wind.  "
        assert self.read([text]) == (text, "", [])

    def test_parsers_share_nothing(self) -> None:
        """Answers run side by side."""
        first, second = self.make(), self.make()
        first.feed(self.answer[: len(self.answer) // 2])
        assert second.feed("a") + second.finish() == [ParsedText("content", "a")]

    def test_another_name_is_refused(self) -> None:
        """The name is this class's."""
        with pytest.raises(ConfigError):
            extension_point(self.kind).find(self.parser + "Other", OutputParser)
