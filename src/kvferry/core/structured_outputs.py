"""The seam of structured output: what a request asks for, and what the engine needs from a library of grammars.

`engine.structured.llguidance_backend` implements it; the server compiles, the scheduler and the executor use matchers.
A matcher's state is a function of the answer's tokens and of nothing else, so that it is the same on every instance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "answer"]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on an answer. `content`: a JSON schema, a regular expression, a JSON list of strings, a grammar
    (Lark or GBNF), a JSON structural tag, or an `AnswerGrammar` as JSON. `whitespace_pattern`: what JSON may have
    between its tokens; None: the default, empty: nothing. `field`: the request's field, for errors."""

    kind: Kind
    content: str
    whitespace_pattern: str | None = None
    field: str = "structured_outputs"

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that name the constraint."""
        facts = msgspec.msgpack.encode([self.kind, self.content, self.whitespace_pattern])
        return hashlib.sha256(facts).hexdigest()[:32]


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning before the rest of an answer, which no constraint touches. `open`, `close`: the texts around it.
    `begun`: the prompt ends within it. `max_tokens`: its longest length."""

    open: str
    close: str
    begun: bool = False
    max_tokens: int | None = None


NUMBER = "{number}"
"""In a `CallForm`: any number."""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of calls. `call`: the texts before a call's name, between name and arguments, and after them.

    `lead`: a text that may precede the first call. `thought`: the texts around reasoning before calls, where the format
    of reasoning itself has no fixed ones. `is_single`: an answer has one call. `call_id`: the model's id of a call,
    with `{name}` and `{number}` of its text; empty: it has none. `parameter`: the texts before the name of an argument,
    between name and value, and after the value; empty: arguments are a JSON object.
    """

    call: tuple[str, str, str]
    begin: str = ""
    separator: str = ""
    end: str = ""
    lead: str = ""
    thought: tuple[str, str] | None = None
    is_single: bool = False
    call_id: str = ""
    parameter: tuple[str, str, str] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the form."""
        return (
            *self.call,
            self.begin,
            self.separator,
            self.end,
            self.lead,
            *(self.thought or ()),
            *(self.parameter or ()),
        )


class CallableFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function with the JSON schema of its arguments. `field`: where the request has it, for errors."""

    name: str
    schema: dict[str, Any]
    field: str = "tools"


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of an answer. `required`: it consists of them; else it may also be any text. `parallel`: it may have
    several."""

    form: CallForm
    functions: tuple[CallableFunction, ...]
    required: bool
    parallel: bool = True


class AnswerGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in parts: reasoning, then calls or a constrained text; with neither, any text. With both, calls are not
    required."""

    thought: Thought | None = None
    calls: Calls | None = None
    text: StructuredOutputs | None = None

    def constraint(self, field: str) -> StructuredOutputs:
        """The constraint on the whole answer. `field`: the request's field, for errors."""
        return StructuredOutputs(kind="answer", content=msgspec.json.encode(self).decode(), field=field)


class Matcher(Protocol):
    """The state of one answer under its grammar. Used from one thread at a time; a failed call leaves it unusable."""

    def permitted(self) -> Any:
        """The permitted tokens, a new uint8 array of numpy of at least ceil(vocab_size / 8): one bit for each token,
        the lowest first. Blocks for milliseconds at most, without the interpreter lock. Raises `GrammarFailed`."""

    def accept(self, token_id: int) -> None:
        """Advance by one token of the answer. Raises `GrammarFailed` if the grammar does not permit it, or a limit is
        exceeded."""

    @property
    def is_complete(self) -> bool:
        """True if the answer satisfies the grammar, and nothing can be added to it."""

    def copy(self) -> Matcher:
        """Another matcher with the same state."""

    def num_permitted(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens, from the first on, that could be accepted one after the other."""


class Grammar(Protocol):
    """A compiled constraint. Thread-safe."""

    def matcher(self, tokens: Sequence[int] = ()) -> Matcher:
        """The state after these tokens of the answer. Raises `GrammarFailed`."""


class GrammarBackend(Protocol):
    """A library of grammars, for one tokenizer. Thread-safe."""

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """Compile a constraint, in bounded time and memory. Raises `InvalidRequest` that says what is not supported,
        and where."""
