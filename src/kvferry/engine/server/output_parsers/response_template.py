"""Parses answers with transformers' `ResponseParser`, by a response template: a checkpoint's own, or one of
`templates.toml`.

`ResponseParser` divides the text into regions, and `parse_response` reads a complete call. Around them: a call that
cannot be read is content, whitespace is kept, and no text is lost.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from kvferry.core.errors import ConfigError
from kvferry.core.names import resolve
from kvferry.engine.server.output_parsers.base import OutputParser, ParsedCall, ParsedOutput, ParsedText, ParserContext
from kvferry.engine.structured.call_parameters import with_types

_IMPLICIT = "content_between_regions"
_NO_ANCHOR = "\0"
_OPEN = "kvferry_open"
_SEPARATORS = re.compile(r"[;\s]*")
_MAX_SPACES = r"\s{0,16}"
_NOT_A_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Raised by transformers, and below, for text that is no call."""

Kind = Literal["content", "reasoning", "call", "mark"]


@dataclass(frozen=True, eq=False)
class OutputTemplate:
    """A format of answers. `fields`: as in a response template. `once`: reasoning comes before all else. `sequence`: a
    region of calls has JSON objects with semicolons between them. `by_character`: what it reads may depend on how the
    text is cut, so each character is fed by itself."""

    fields: Mapping[str, Mapping[str, Any]]
    once: bool = False
    sequence: bool = False
    by_character: bool = False

    @classmethod
    def from_checkpoint(cls, template: Any) -> OutputTemplate:
        """The template that a checkpoint ships. Raises `ConfigError`."""
        try:
            _load(template)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the checkpoint's response_template cannot be read: {error}") from error
        has_patterns = any(key.endswith("_pattern") for field in template["fields"].values() for key in field)
        return cls(template["fields"], by_character=has_patterns)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each field. Fields with other names are content."""
        return {_IMPLICIT: "content", **{name: _kind_of(name) for name in self.fields}}

    @cached_property
    def regions(self) -> Any:
        """A template that only divides the text into regions. A region's value is its text as it is, and the text that
        opens it."""
        fields = {name: _region(field) for name, field in self.fields.items() if _is_explicit(field)}
        fields[_IMPLICIT] = {"content": "text", "content_args": _AS_IT_IS}
        return _load({"start_anchor": _NO_ANCHOR, "fields": fields})

    @cached_property
    def calls(self) -> dict[str, Any]:
        """For each kind of call, a template that reads it."""
        return {
            name: _load({"start_anchor": _NO_ANCHOR, "fields": {name: _bounded(field), _IMPLICIT: {"content": "text"}}})
            for name, field in self.fields.items()
            if self.kinds[name] == "call"
        }

    @cached_property
    def patterns(self) -> str:
        """All texts and patterns that delimit regions and arguments, without backslashes."""
        keys = ("open", "open_pattern", "close", "close_pattern")
        texts = [field[key] for field in self.fields.values() for key in keys if key in field]
        texts += [field.get("content_args", {}).get("tag_pattern", "") for field in self.fields.values()]
        return "\n".join(text if isinstance(text, str) else "\n".join(text) for text in texts).replace("\\", "")

    @property
    def thought(self) -> tuple[str, str] | None:
        """The texts before and after reasoning, if they are always the same."""
        for name, field in self.fields.items():
            if self.kinds[name] == "reasoning" and isinstance(field.get("open"), str):
                close = field.get("close")
                return (field["open"], close) if isinstance(close, str) else None
        return None

    @cached_property
    def without_calls(self) -> OutputTemplate:
        """The template without its formats of calls."""
        fields = {name: field for name, field in self.fields.items() if self.kinds[name] != "call"}
        return replace(self, fields=fields)

    @cached_property
    def before_all(self) -> OutputTemplate:
        """The template for answers whose reasoning comes before all else."""
        return replace(self, once=True)

    @property
    def has_calls(self) -> bool:
        """True if it has a format of calls."""
        return "call" in self.kinds.values()

    @property
    def has_reasoning(self) -> bool:
        """True if it has a format of reasoning."""
        return "reasoning" in self.kinds.values()


_LIBRARY = "transformers.utils.chat_parsing"
"""Resolved where it is used, because it brings all of transformers along: a server without a format does without."""


def _load(template: Any) -> Any:
    """The compiled template. Raises the library's errors."""
    logger = resolve(f"{_LIBRARY}.response_templates:logger")
    logger.setLevel(logging.WARNING)  # it reports for each answer that the prefix has no anchor
    return resolve(f"{_LIBRARY}.response_templates:load_response_template")(template)


_AS_IT_IS = {"strip": False}


def _kind_of(name: str) -> Kind:
    if name.startswith("tool_calls"):
        return "call"
    if name.startswith("mark"):
        return "mark"
    return "reasoning" if name.startswith(("reasoning", "thinking")) else "content"


def _is_explicit(field: Mapping[str, Any]) -> bool:
    return "open" in field or "open_pattern" in field


def _bounded(field: Mapping[str, Any]) -> dict[str, Any]:
    """The field, with bounds for whitespace in its patterns: searching must not take quadratic time."""
    bounded = {
        key: value.replace(r"\s*", _MAX_SPACES) if key.endswith("_pattern") else value for key, value in field.items()
    }
    if "tag_pattern" in (arguments := bounded.get("content_args", {})):
        tag = arguments["tag_pattern"].replace(r"\s*", _MAX_SPACES)
        bounded["content_args"] = {**arguments, "tag_pattern": tag}
    return bounded


def _region(field: Mapping[str, Any]) -> dict[str, Any]:
    region = {key: value for key, value in _bounded(field).items() if key in ("close", "close_pattern")}
    pattern = _bounded(field).get("open_pattern")
    if pattern is None:
        literals = [field["open"]] if isinstance(field["open"], str) else field["open"]
        pattern = "|".join(re.escape(literal) for literal in sorted(literals, key=len, reverse=True))
    region["open_pattern"] = f"(?P<{_OPEN}>{pattern})"
    region["content"], region["content_args"], region["repeats"] = "text", _AS_IT_IS, True
    region["transform"] = {"open": f"{{{_OPEN}}}", "body": "{content}"}
    return region


class TemplateParser(OutputParser):
    """Parses one answer by a template."""

    def __init__(self, template: OutputTemplate, context: ParserContext) -> None:
        self._template = template
        self._tools = [with_types(tool) for tool in context.tools]
        self._parser = resolve(f"{_LIBRARY}:ResponseParser")(template.regions, prefix=context.prefix)
        """None: all that follows is content."""
        self._raw = context.prefix
        """The text since the last region ended; the open region's text is still in it."""
        self._in_region = ""
        """The name of the region that is open, unless it is the implicit one."""
        self._has_called = False
        self._parts(self._parser.initial_events)

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends within reasoning."""
        return self._template.kinds.get(self._in_region) == "reasoning"

    def feed(self, text: str) -> list[ParsedOutput]:
        """The parts that `text` completes; reasoning and content as they come, a call when it is closed."""
        parts: list[ParsedOutput] = []
        for chunk in text if self._template.by_character else [text]:
            if self._parser is None:
                parts += [ParsedText("content", chunk)] if chunk else []
                continue
            self._raw += chunk
            parts += self._parts(self._parser.feed(chunk))
        return parts

    def finish(self) -> list[ParsedOutput]:
        """The rest; a call that is complete but not closed is one."""
        if self._parser is None:
            return []
        _, events = self._parser.finalize()
        return self._parts(events)

    def _parts(self, events: Sequence[dict[str, Any]]) -> list[ParsedOutput]:
        parts: list[ParsedOutput] = []
        for event in events:
            name, kind = event["field"], self._template.kinds[event["field"]]
            is_implicit = name == _IMPLICIT
            match event["type"]:
                case "region_open" if not is_implicit:
                    self._in_region = name
                case "region_chunk":
                    if is_implicit:
                        self._raw = self._raw[len(event["text"]) :]
                    if kind in ("content", "reasoning"):
                        parts.append(ParsedText(kind, event["text"]))
                    if is_implicit and self._template.once and event["text"].strip():
                        return [*parts, *self._rest()]
                case "region_close" if not is_implicit:
                    self._in_region = ""
                    region = self._take(name, event["value"])
                    if kind == "call":
                        parts += self._calls(name, region)
                    elif kind == "mark" and not self._has_called:
                        parts.append(ParsedText("content", region))
                    elif self._template.once:
                        return [*parts, *self._rest()]
        return parts

    def _take(self, name: str, value: Mapping[str, str]) -> str:
        """Remove a closed region, with its delimiters, from the text, and return it."""
        end = len(value["open"]) + len(value["body"])
        close = self._template.regions.fields[name].close_re
        closing = close.match(self._raw, end) if close is not None else None
        end = end if closing is None else closing.end()
        region, self._raw = self._raw[:end], self._raw[end:]
        return region

    def _rest(self) -> list[ParsedOutput]:
        self._parser = None
        rest, self._raw = self._raw, ""
        return [ParsedText("content", rest)] if rest else []

    def _calls(self, name: str, region: str) -> list[ParsedOutput]:
        """The calls in a region, with the whitespace before it; the region as content, if it has none. It is read as
        the field that began it, else as any other that fits."""
        for field_name in dict.fromkeys((name, *self._template.calls)):
            try:
                chunks = _objects(region) if self._template.sequence else [region]
                calls = [call for chunk in chunks for call in self._read(field_name, chunk)]
            except _NOT_A_CALL:
                continue
            self._has_called = True
            spaces = region[: len(region) - len(region.lstrip())]
            return [*([ParsedText("content", spaces)] if spaces else []), *calls]
        return [ParsedText("content", region)]

    def _read(self, name: str, region: str) -> list[ParsedCall]:
        is_typed = self._template.fields[name].get("content") == "json"
        tools = None if is_typed else self._tools
        message = resolve(f"{_LIBRARY}:parse_response")(region, self._template.calls[name], prefix="", tools=tools)
        values = message.pop(name)
        if any(message.values()) or not values:
            raise ValueError("text beside the call")
        values = [values] if isinstance(values, dict) else values
        return [_call(inner) for value in values for inner in (value if isinstance(value, list) else [value])]


def _objects(text: str) -> Iterator[str]:
    """The JSON objects in the text. Raises `ValueError` if anything but separators is between them."""
    decoder, end = json.JSONDecoder(), text.index("{")
    while end < len(text):
        begin = end
        _, end = decoder.raw_decode(text, begin)
        yield text[begin:end]
        separators = _SEPARATORS.match(text, end)
        end = end if separators is None else separators.end()


def _call(value: Any) -> ParsedCall:
    """A call as the client gets it. Raises one of `_NOT_A_CALL`."""
    function, call_id = value["function"], value.get("id")
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not _is_encodable(text):
        text = json.dumps(arguments)
    if not _is_encodable(name):
        raise ValueError("the name is not text")
    return ParsedCall(name, text, call_id if isinstance(call_id, str) and call_id else None)


def _is_encodable(text: str) -> bool:
    """False for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
