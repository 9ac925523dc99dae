"""The output parsers of one server, by the names of its flags or by the checkpoint's own files, and of one answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec

from kvferry.core.structured_outputs import CallForm, Thought
from kvferry.engine.parser_names import NONE, ParserKind, extension_point, formats
from kvferry.engine.server.output_parsers.base import OutputParser, ParserContext, Stages
from kvferry.engine.server.output_parsers.forced_calls import ForcedCallParser
from kvferry.engine.server.output_parsers.response_template import OutputTemplate, TemplateParser
from kvferry.engine.structured.call_parameters import parameters_of

_FALLBACK = "hermes"
"""The form of calls that a request forces, for models without a form of their own."""

_CHECKPOINT = "response_template"


@dataclass(frozen=True, eq=False)
class ParserEntry:
    """One parser. `anchor`: what precedes an answer in the prompt; None: the end of the prompt itself decides. `form`:
    how calls are written, for grammars. `short_ids`: ids of calls have nine letters and digits."""

    name: str
    source: OutputTemplate | type[OutputParser]
    anchor: re.Pattern[str] | None = None
    form: CallForm | None = None
    short_ids: bool = False

    @property
    def thought(self) -> tuple[str, str] | None:
        """The texts before and after reasoning, as far as grammars can have them."""
        return self.source.thought if isinstance(self.source, OutputTemplate) else None

    def without_calls(self) -> ParserEntry:
        """The same parser, for which the text of calls is content."""
        source = self.source
        if not isinstance(source, OutputTemplate) or not source.has_calls:
            return self
        return replace(self, source=source.without_calls)

    def before_all(self) -> ParserEntry:
        """The same parser for answers of a grammar: reasoning comes first, and what looks like it within arguments or
        text is a part of these."""
        source = self.source
        return replace(self, source=source.before_all) if isinstance(source, OutputTemplate) else self

    def make(self, context: ParserContext) -> OutputParser:
        """A parser of one answer."""
        source = self.source
        return TemplateParser(source, context) if isinstance(source, OutputTemplate) else source(context)

    def sees(self, token: str) -> bool:
        """True if the parser must see this special token."""
        source = self.source
        if self.form is not None and any(token in text for text in self.form.texts):
            return True
        return token in source.patterns if isinstance(source, OutputTemplate) else token in source.markers()

    def prefix(self, prompt: str) -> str:
        """The beginning of the answer that is the end of this prompt."""
        if self.anchor is not None:
            ends = [match.end() for match in self.anchor.finditer(prompt)]
            return prompt[ends[-1] :] if ends else ""
        stripped = prompt.rstrip()
        opening = self.thought[0].rstrip() if self.thought is not None else ""
        return prompt[len(stripped) - len(opening) :] if opening and stripped.endswith(opening) else ""


@dataclass(frozen=True)
class AnswerFormat:
    """The way in which the answers of one request are parsed. `stages`: each parser with the context that it is made
    with. `hidden_tokens`: special tokens that are no text for a parser."""

    stages: tuple[tuple[ParserEntry, ParserContext], ...]
    hidden_tokens: frozenset[int]
    thought: Thought | None = None
    form: CallForm | None = None
    has_reasoning: bool = False
    forced: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The functions of which a grammar writes calls in `form`, each with the names of its arguments that are texts;
    empty: it does not."""

    @property
    def name(self) -> str:
        """The names of the parsers, which differ on instances that parse otherwise; empty: none."""
        return "+".join(entry.name for entry, _ in self.stages) + (" forced" if self.forced else "")

    @property
    def has_short_ids(self) -> bool:
        """True if the ids of calls have nine letters and digits."""
        return any(entry.short_ids for entry, _ in self.stages)

    def make(self) -> OutputParser | None:
        """A parser of one answer; None: the text is the content."""
        stages = self.stages[:-1] if self.forced else self.stages
        parsers = [entry.make(context) for entry, context in stages]
        if self.forced and self.form is not None:
            parsers.append(ForcedCallParser(self.form, self.forced))
        if not parsers:
            return None
        return Stages(*parsers) if len(parsers) == 2 else parsers[0]


class OutputParsers:
    """The parsers of one server. Raises `ConfigError` for a name that cannot be loaded."""

    def __init__(self, tokenizer: Any, *, tools: str | None = None, reasoning: str | None = None) -> None:
        template = _chat_template(tokenizer)
        response_template = getattr(tokenizer, "response_template", None)
        checkpoint = None if response_template is None or (tools and reasoning) else _of_checkpoint(response_template)
        self.tools = _choose("tools", tools, checkpoint, template)
        self.reasoning = _choose("reasoning", reasoning, checkpoint, template)
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._added = tuple(token.content for token in added.values())
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}

    def answer_format(
        self,
        prompt: str,
        *,
        tools: Sequence[dict[str, Any]] = (),
        is_forced: bool = False,
        is_required: bool = False,
        is_json: bool = False,
        continued: str | None = None,
        max_thought_tokens: int | None = None,
    ) -> AnswerFormat:
        """The format of the answers to a prompt. `tools`: those that may be called. `is_forced`: a grammar writes the
        calls; `is_required`: and nothing else after the reasoning. `is_json`: a grammar writes JSON after it.
        `continued`: the beginning of the answer, where the request has it."""
        reasoning, calls = self.reasoning, self.tools if tools else None
        forced: Mapping[str, Collection[str]] = dict.fromkeys(_names(tools), ()) if is_required else {}
        if calls is not None and calls.form is not None and calls.form.parameter is not None:
            texts = _text_arguments(tools) if is_required else None
            calls, forced = (replace(calls, form=None), forced) if texts is None else (calls, texts)
        if is_forced and (calls is None or calls.form is None):
            calls = _named("tools", _FALLBACK)
        if reasoning is not None and reasoning is not calls:
            reasoning = reasoning.without_calls()
            if forced or is_json:
                reasoning = reasoning.before_all()
        entries = [entry for entry in dict.fromkeys((reasoning, calls)) if entry is not None]
        stages = []
        for index, entry in enumerate(entries):
            prefix = "" if index else _prefix_of(entry, prompt, continued)
            stages.append((entry, ParserContext(prefix.replace("\0", ""), tools)))
        form = calls.form if calls is not None else None
        thought = _thought(stages[0], prompt, max_thought_tokens) if stages and reasoning is not None else None
        if thought is None and reasoning is not None and is_required and form is not None and form.thought is not None:
            thought = Thought(open=form.thought[0], close=form.thought[1], max_tokens=max_thought_tokens)
        return AnswerFormat(tuple(stages), self._hidden(entries), thought, form, reasoning is not None, forced)

    def is_token(self, text: str) -> bool:
        """True if the text begins with a token of its own, which free text does not contain."""
        return any(text.startswith(token) for token in self._added if token)

    def _hidden(self, entries: Sequence[ParserEntry]) -> frozenset[int]:
        """The special tokens that no parser must see; without a parser, the detokenizer itself skips them."""
        if not entries:
            return frozenset()
        return frozenset(
            token_id for token_id, text in self._special.items() if not any(entry.sees(text) for entry in entries)
        )


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _text_arguments(tools: Sequence[dict[str, Any]]) -> dict[str, list[str]] | None:
    """For each function, its arguments that are texts in a format with tags; None: tags cannot carry one of them."""
    texts: dict[str, list[str]] = {}
    for name, tool in zip(_names(tools), tools, strict=True):
        parameters = parameters_of(tool["function"].get("parameters"))
        if parameters is None:
            return None
        texts[name] = [parameter.key for parameter in parameters if parameter.is_text]
    return texts


def _prefix_of(entry: ParserEntry, prompt: str, continued: str | None) -> str:
    if continued is None:
        return entry.prefix(prompt)
    begin = prompt.rfind(continued.strip()) if continued.strip() else -1
    return prompt[begin:] if begin >= 0 else ""


def _thought(stage: tuple[ParserEntry, ParserContext], prompt: str, max_tokens: int | None) -> Thought | None:
    """The reasoning that comes in the answer; None: the prompt has it already, or it has no fixed delimiters."""
    entry, context = stage
    if entry.thought is None:
        return None
    opening, closing = entry.thought
    parser = entry.make(context)
    begun = isinstance(parser, TemplateParser) and parser.is_reasoning
    if not begun and (closing in context.prefix or prompt.rstrip().endswith(closing.rstrip())):
        return None
    return Thought(open=opening, close=closing, begun=begun, max_tokens=max_tokens)


def _choose(kind: ParserKind, name: str | None, checkpoint: ParserEntry | None, template: str) -> ParserEntry | None:
    """The parser that is set, else the checkpoint's own, else one whose format its chat template has."""
    if name is not None:
        return None if name == NONE else _named(kind, name)
    if checkpoint is not None:
        assert isinstance(checkpoint.source, OutputTemplate)  # `_of_checkpoint` makes no other
        has = checkpoint.source.has_calls if kind == "tools" else checkpoint.source.has_reasoning
        if has:
            return checkpoint
    for format_name, entry in formats(kind).items():
        if template and all(text in template for text in entry["recognized_by"]):
            return _named(kind, format_name)
    return None


@lru_cache(maxsize=64)
def _named(kind: ParserKind, name: str) -> ParserEntry:
    point = extension_point(kind)
    point.require_known(name)
    if name not in point.table:
        return ParserEntry(name, point.find(name, OutputParser))
    format_name = point.table[name]
    entry = formats(kind)[format_name]
    form = msgspec.convert(entry["form"], CallForm) if "form" in entry else None
    template = OutputTemplate(entry["fields"], once=entry.get("once", False), sequence=entry.get("sequence", False))
    return ParserEntry(format_name, template, form=form, short_ids=entry.get("id") == "nine")


def _of_checkpoint(template: Any) -> ParserEntry:
    source = OutputTemplate.from_checkpoint(template)
    anchor = template.get("start_anchor_pattern")
    if anchor is None:
        literals = template["start_anchor"]
        anchor = "|".join(map(re.escape, [literals] if isinstance(literals, str) else literals))
    return ParserEntry(_CHECKPOINT, source, anchor=re.compile(anchor, re.DOTALL))


def _chat_template(tokenizer: Any) -> str:
    """The text of the checkpoint's chat template, or of all that it has."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
