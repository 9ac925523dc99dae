"""Grammars by llguidance (https://github.com/guidance-ai/llguidance), the only file that imports it.

llguidance refuses keywords of JSON Schema that it does not implement, where other libraries relax them. Its limits
bound the time and memory that a grammar takes, both when it is compiled and for each token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer

from kvferry.core.errors import GrammarFailed, InvalidRequest
from kvferry.core.structured_outputs import AnswerGrammar, StructuredOutputs
from kvferry.core.text import shortened
from kvferry.engine.structured.answer_grammar import AnswerGrammarWriter, string_of
from kvferry.engine.structured.schema_paths import pointers_to, subschemas

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""At most about 0.1 GB for the states of one grammar, and milliseconds for one mask."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between JSON's tokens. Bounded, because a model may otherwise write it without end."""

_KEYS = re.compile(r'Unimplemented keys: \["(?P<key>[^"]*)"')
_KEYWORD_OF = {
    "oneOf": "oneOf",
    "patternProperty": "patternProperties",
    "regex": "pattern",
    "format": "format",
    "Pointer": "$ref",
    "Resource": "$ref",
    "type": "type",
    "enum": "enum",
    "const": "const",
    "multipleOf": "multipleOf",
    "allOf": "allOf",
    "anyOf": "anyOf",
    "minimum": "minimum",
    "maximum": "maximum",
    "required": "required",
    "minLength": "minLength",
    "minItems": "minItems",
}
"""The keywords that messages of llguidance are about, by a word in them; the first one that matches."""

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE_PATTERN = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK_PATTERN = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME_PATTERN = rf"{_CLOCK_PATTERN}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{_CLOCK_PATTERN})"
_EXACT_FORMATS = {
    "date": f"^{_DATE_PATTERN}$",
    "time": f"^{_TIME_PATTERN}$",
    "date-time": f"^{_DATE_PATTERN}[Tt]{_TIME_PATTERN}$",
}


class LlguidanceBackend:
    """Compiles for one tokenizer. Building it takes about a second for a vocabulary of 131,072 tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises `ValueError` for a tokenizer that llguidance cannot read."""
        self._tokenizer = _ll_tokenizer(tokenizer, vocab_size, tuple(sorted(eos_token_ids)))
        self._added = tokenizer.get_added_vocab()
        self._answers = AnswerGrammarWriter(self._added, eos_token_ids)

    def compile(self, constraint: StructuredOutputs) -> LlguidanceGrammar:
        """Compile in bounded time. Raises `InvalidRequest` with the JSON pointer of a keyword that is not supported."""
        if constraint.kind == "answer":
            return self._compile_answer(constraint)
        schema = _require_schema(constraint)
        pristine = LLMatcher(self._tokenizer, self._grammar(constraint), log_level=0, limits=LIMITS)
        if problem := pristine.get_error():
            raise InvalidRequest(_explained(problem, schema, constraint.field), param=constraint.field)
        if not pristine.is_accepting() and pristine.is_stopped():
            raise InvalidRequest(f"{constraint.field}: no answer can satisfy it", param=constraint.field)
        return LlguidanceGrammar(pristine, self._tokenizer.vocab_size)

    def _compile_answer(self, constraint: StructuredOutputs) -> LlguidanceGrammar:
        """Compile a whole answer. Where that fails, each of its parts is compiled alone, for an error that names it."""
        answer = msgspec.json.decode(constraint.content, type=AnswerGrammar)
        parts: list[StructuredOutputs] = []

        def write(part: StructuredOutputs) -> dict[str, Any]:
            parts.append(part)
            _require_schema(part)
            return _sub_grammar(self._grammar(part))

        pristine = LLMatcher(self._tokenizer, self._answers.write(answer, write), log_level=0, limits=LIMITS)
        if problem := pristine.get_error():
            for part in parts:
                self.compile(part)
            raise InvalidRequest(f"{constraint.field}: {_clip(problem)}", param=constraint.field)
        return LlguidanceGrammar(pristine, self._tokenizer.vocab_size)

    def _grammar(self, constraint: StructuredOutputs) -> str:
        content, field = constraint.content, constraint.field
        match constraint.kind:
            case "json":
                schema = json.loads(content)
                _with_exact_formats(schema)
                text = json.dumps({} if schema is True else schema, ensure_ascii=False)  # options need an object
                try:
                    return LLMatcher.grammar_from_json_schema(text, overrides=_json_options(constraint))
                except ValueError as error:  # numbers such as 1e999
                    raise InvalidRequest(f"{field}: {_clip(str(error))}", param=field) from error
            case "regex":
                return LLMatcher.grammar_from_regex(content)
            case "choice":
                choices = " | ".join(string_of(choice) for choice in json.loads(content))
                return LLMatcher.grammar_from_lark(f"start: {choices}")
            case "grammar":
                try:
                    return LLMatcher.grammar_from_lark(any_to_lark(content))
                except Exception as error:  # the converter raises bare exceptions
                    raise InvalidRequest(f"{field}: the grammar cannot be read: {error}", param=field) from error
            case "structural_tag":
                return self._tag_grammar(json.loads(content))
            case "answer":
                raise ValueError("an answer's grammar is no part of another one")

    def _tag_grammar(self, structural_tag: dict[str, Any]) -> str:
        """Free text in which each trigger begins a structure. A trigger may be a special token of the tokenizer."""
        tags = [
            StructTag(
                trigger=next(
                    trigger for trigger in structural_tag["triggers"] if structure["begin"].startswith(trigger)
                ),
                begin=structure["begin"],
                grammar=_tag_schema(structure["schema"]),
                end=structure["end"],
            )
            for structure in structural_tag["structures"]
        ]
        grammar: str = StructTag.to_grammar(tags, assume_special=all(tag.trigger in self._added for tag in tags))
        return grammar


class LlguidanceGrammar:
    """A compiled grammar. Matchers are copies of one that has seen no token, and share its lexer."""

    def __init__(self, pristine: LLMatcher, vocab_size: int) -> None:
        """`vocab_size`: of the tokenizer that it was compiled for."""
        self._pristine, self._vocab_size = pristine, vocab_size

    def matcher(self, tokens: Sequence[int] = ()) -> LlguidanceMatcher:
        """The state after these tokens. Raises `GrammarFailed`."""
        matcher = LlguidanceMatcher(self._pristine.deep_copy(), self._vocab_size)
        for token_id in tokens:
            matcher.accept(token_id)
        return matcher


class LlguidanceMatcher:
    """One answer's state."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def permitted(self) -> Any:
        """The permitted tokens as bits. Raises `GrammarFailed`."""
        words = np.empty(-(-self._vocab_size // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # refuses a buffer of another size
        self._require_healthy()  # it raises nothing else
        return words.view(np.uint8)

    def accept(self, token_id: int) -> None:
        """Advance by one token. Raises `GrammarFailed`."""
        if not self._matcher.consume_token(token_id):
            self._require_healthy()
            raise GrammarFailed(f"the grammar does not permit token {token_id} here", param="structured_outputs")

    @property
    def is_complete(self) -> bool:
        """True if the answer satisfies the grammar, and nothing can be added."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def copy(self) -> LlguidanceMatcher:
        """Another one with the same state; both share the lexer."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._vocab_size)

    def num_permitted(self, token_ids: Sequence[int]) -> int:
        """Number of the tokens that could be accepted."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def _require_healthy(self) -> None:
        if self._matcher.is_error():
            reason = _clip(self._matcher.get_error())
            raise GrammarFailed(f"the answer cannot go on under its grammar: {reason}", param="structured_outputs")


_STRICT = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}


def _json_options(constraint: StructuredOutputs) -> Any:
    pattern = constraint.whitespace_pattern
    if pattern == "":
        return {"lenient": False, "coerce_one_of": False, "whitespace_flexible": False, "whitespace_pattern": None}
    return _STRICT | ({} if pattern is None else {"whitespace_pattern": pattern})


def _tag_schema(schema: dict[str, Any]) -> str:
    _with_exact_formats(schema)
    return json.dumps(schema | {"x-guidance": _STRICT})


@lru_cache(maxsize=4)
def _ll_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Cached, because many servers of one process may have the same tokenizer."""
    return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_token_ids) or None)


def _sub_grammar(grammar: str) -> dict[str, Any]:
    """A grammar as a part of another one."""
    if not grammar.startswith("{"):
        return {"lark_grammar": grammar}
    (only,) = json.loads(grammar)["grammars"]
    return {key: value for key, value in only.items() if value is not None}


def _require_schema(constraint: StructuredOutputs) -> Any:
    """The constraint's schema; None: it has none. Raises `InvalidRequest` for one that cannot be followed."""
    schema = _schema_of(constraint)
    if schema is False:
        raise InvalidRequest(f"{constraint.field}: no answer can satisfy it", param=constraint.field)
    if schema is not None:
        _refuse_before(schema, constraint.field)
    return schema


def _schema_of(constraint: StructuredOutputs) -> Any:
    """The schema, for pointers into it; of a structural tag, all its schemas."""
    if constraint.kind == "json":
        return json.loads(constraint.content)
    if constraint.kind == "structural_tag":
        return {"anyOf": [structure["schema"] for structure in json.loads(constraint.content)["structures"]]}
    return None


def _refuse_before(schema: Any, field: str) -> None:
    """Refuse what llguidance would read as an option of its own, or would take for something else."""
    is_draft_7 = isinstance(schema, dict) and "draft-07" in str(schema.get("$schema"))
    for pointer, part in subschemas(schema):
        refused = ["x-guidance"]
        if "$ref" in part and pointer:
            refused.append("$id")  # in earlier drafts it is ignored beside a reference
        if is_draft_7:
            refused += ["contentEncoding", "contentMediaType"]  # an annotation in later drafts
        for keyword in refused:
            if keyword in part:
                raise InvalidRequest(f"{field}: {pointer}/{keyword}: not supported by this server", param=field)


def _explained(problem: str, schema: Any, field: str) -> str:
    """llguidance's message, with the JSON pointer of the keyword that it is about."""
    match = _KEYS.search(problem)
    if match is not None:
        pointers = pointers_to(schema, match["key"])
        return f"{field}: {_first(pointers)}the keyword {match['key']!r} is not supported by this server"
    for word, keyword in _KEYWORD_OF.items():
        if schema is not None and word in problem and (pointers := pointers_to(schema, keyword)):
            return f"{field}: {_first(pointers)}{_clip(problem)}"
    return f"{field}: {_clip(problem)}"


def _first(pointers: Sequence[str]) -> str:
    return f"{_clip(pointers[0])}: " if pointers else ""


def _clip(text: str) -> str:
    return shortened(" ".join(text.split()), 400)


def _with_exact_formats(schema: Any) -> None:
    """Replace formats by patterns in the schema, in place, where llguidance's own permit what is not valid: February 29
    of any year, and leap seconds at any minute. Leap seconds, and fractions beyond nanoseconds, are not permitted."""
    for _, part in subschemas(schema):
        pattern = _EXACT_FORMATS.get(part["format"]) if isinstance(part.get("format"), str) else None
        if pattern is None:
            continue
        del part["format"]
        if "pattern" in part:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": pattern}]
        else:
            part["pattern"] = pattern
