"""Grammars of whole answers: reasoning, then calls or a constrained text, as one grammar of llguidance.

Special tokens of the vocabulary are written as tokens, because no text of a grammar matches them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.core.structured_outputs import NUMBER, AnswerGrammar, Calls, StructuredOutputs, Thought
from kvferry.engine.structured.call_parameters import Parameter, parameters_of

_ANY = r"/(?s:.*)/"
_SPACES = r"/[ \t\r\n]{0,16}/"
_NUMBER = "/[0-9]{1,4}/"


def string_of(text: str) -> str:
    """The text as a string of a grammar. llguidance refuses the control character 127 in it, which JSON permits."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _escaped(text: str) -> str:
    """The text within a regular expression of a grammar."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


class AnswerGrammarWriter:
    """Writes grammars for one vocabulary. `added`: the ids of its added tokens; `eos`: tokens that end an answer."""

    def __init__(self, added: Mapping[str, int], eos: Collection[int]) -> None:
        self._added = added
        self._eos = frozenset(eos)
        texts = sorted({NUMBER, *filter(None, added)}, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")")

    def write(self, grammar: AnswerGrammar, part: Callable[[StructuredOutputs], dict[str, Any]]) -> str:
        """The grammar as llguidance's JSON. `part`: writes the grammar of a constraint. Raises `InvalidRequest`."""
        parts: dict[str, dict[str, Any]] = {}

        def name_of(constraint: StructuredOutputs) -> str:
            name = f"part_{len(parts)}"
            parts[name] = part(constraint) | {"name": name}
            return f"@{name}"

        rules = ["spaces: " + _SPACES]
        reserved: list[str] = []
        start = ""
        if grammar.thought is not None:
            rules += self._thought(grammar.thought)
            start = "thought spaces " if grammar.thought.begun else "(spaces opening thought)? spaces "
            reserved += self._symbols(grammar.thought.open)
        if grammar.calls is not None:
            rules += self._calls(grammar.calls, name_of)
        if grammar.text is not None:
            text = name_of(grammar.text)
            start += text if grammar.calls is None else f"({text} | calls)"
        elif grammar.calls is not None:
            reserved += self._symbols(grammar.calls.form.begin or grammar.calls.form.call[0])[:1]
            start += "calls" if grammar.calls.required else f"free (calls free){'*' if grammar.calls.parallel else '?'}"
        else:
            start = start.removesuffix("spaces ") + "free"
        if "free" in start:
            rules += self._free(reserved)
        return json.dumps({"grammars": [{"lark_grammar": "\n".join([f"start: {start}", *rules])}, *parts.values()]})

    def _thought(self, thought: Thought) -> list[str]:
        close = self._symbols(thought.close)
        rules = [] if thought.begun else ["opening: " + " ".join(self._symbols(thought.open))]
        limit = f"[max_tokens={thought.max_tokens}]" if thought.max_tokens is not None else ""
        if len(close) == 1 and close[0].startswith("<["):
            if thought.max_tokens == 0:
                return [*rules, f"thought: {close[0]}"]
            return [*rules, f"thought: thinking {close[0]}", f"thinking{limit}: {_ANY}"]
        if limit:
            raise InvalidRequest(
                "thinking_token_budget needs a model whose reasoning ends with a token of its own",
                param="thinking_token_budget",
            )
        return [*rules, f"thought[suffix={string_of(thought.close)}]: {_ANY}"]

    def _calls(self, calls: Calls, name_of: Callable[[StructuredOutputs], str]) -> list[str]:
        form, rules = calls.form, []
        for index, function in enumerate(calls.functions):
            before, between, after = form.call
            parameters = parameters_of(function.schema) if form.parameter is not None else None
            if form.parameter is None:
                schema = json.dumps({"type": "object"} | function.schema, ensure_ascii=False)
                arguments = [name_of(StructuredOutputs(kind="json", content=schema, field=function.field))]
            elif parameters is None:
                raise InvalidRequest(
                    f"{function.field}: arguments in tags cannot have this schema", param=function.field
                )
            else:
                arguments = []
                for parameter in parameters:
                    name = f"call_{index}_{len(arguments)}"
                    rules += self._parameter(name, parameter, form.parameter, function.field, name_of)
                    arguments.append(name if parameter.is_required else f"({name})?")
            sequence = [
                *self._symbols(before),
                string_of(function.name),
                *self._symbols(between),
                *arguments,
                *self._symbols(after),
            ]
            rules.append(f"call_{index}: {' '.join(sequence)}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls.functions))))
        is_single = form.is_single or not calls.parallel
        more = "" if is_single else f"({' '.join([*self._symbols(form.separator), 'call'])})*"
        lead = [f"({' '.join(self._symbols(form.lead))})?"] if form.lead else []
        rules.append(" ".join(["calls:", *lead, *self._symbols(form.begin), "call", more, *self._symbols(form.end)]))
        return rules

    def _parameter(
        self,
        name: str,
        parameter: Parameter,
        tags: tuple[str, str, str],
        field: str,
        name_of: Callable[[StructuredOutputs], str],
    ) -> list[str]:
        """The rules of one argument, of which the first one has this name. A text has nothing that ends it."""
        before, between, after = tags
        opening = " ".join([*self._symbols(before), string_of(parameter.key), *self._symbols(between)])
        closing = self._symbols(after)
        if not parameter.is_text:
            field = f"{field}.properties.{parameter.key}"
            value = name_of(StructuredOutputs(kind="json", content=parameter.json_schema, field=field))
            return [f"{name}: {opening} {value} {' '.join(closing)}"]
        if parameter.choices:
            choices = " | ".join(string_of(choice) for choice in parameter.choices)
            return [f"{name}: {opening} ({choices}) {' '.join(closing)}"]
        highest = "" if parameter.max_length is None else parameter.max_length
        text = f"(?s:.{{{parameter.min_length},{highest}}})"
        excluded = f"~/(?s:.*){_escaped(after.strip())}(?s:.*)/"
        token = next((number for number, symbol in enumerate(closing) if symbol.startswith("<[")), None)
        if token is None:
            suffix = string_of(after)
            return [
                f"{name}: {opening} {name}_value",
                f"{name}_value[suffix={suffix}]: {name.upper()}_TEXT",
                f"{name.upper()}_TEXT: /{text}/ & {excluded}",
            ]
        lead = "".join(map(json.loads, closing[:token]))
        return [
            f"{name}: {opening} {name.upper()}_TEXT {' '.join(closing[token:])}",
            f"{name.upper()}_TEXT: /{text}{_escaped(lead)}/ & {excluded}",
        ]

    def _free(self, reserved: Iterable[str]) -> list[str]:
        """Any text with any special tokens, except those that end an answer and the reserved ones."""
        ids = sorted({token for token in self._added.values() if f"<[{token}]>" not in set(reserved)} - self._eos)
        special = f" | <[{','.join(map(str, ids))}]>" if ids else ""
        return [f"free: (FREE{special})*", "FREE: /(?s:.+)/"]

    def _symbols(self, text: str) -> list[str]:
        """The text as strings and tokens of a grammar."""
        return [self._symbol(symbol) for symbol in self._split.split(text) if symbol]

    def _symbol(self, symbol: str) -> str:
        if symbol == NUMBER:
            return _NUMBER
        return f"<[{self._added[symbol]}]>" if symbol in self._added else string_of(symbol)
