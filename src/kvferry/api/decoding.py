"""Decodes the bytes of a body into a request struct: strictly, within limits, and with readable errors.

Other encodings, duplicate names, too many values, too deep nesting and fields that are too large are refused before
objects are created from them. `decode_body` holds the interpreter lock for up to about 50 ms, for the largest body that
it accepts; servers call it in a thread above `THREAD_ABOVE_BYTES`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from kvferry.api.fields import ignored_fields
from kvferry.api.other_fields import REFUSED
from kvferry.api.requests import MAX_FIELD_BYTES
from kvferry.api.strict import MAX_DEPTH, read_object, read_texts, unpaired_surrogate
from kvferry.core.errors import InvalidRequest
from kvferry.core.text import shortened

Body = TypeVar("Body", bound=msgspec.Struct)

THREAD_ABOVE_BYTES = 64 * 1024
"""Size above which decoding would block an event loop for too long."""

MAX_VALUES = 1_000_000
"""Maximum number of values in a body, counted by its commas; enough for a prompt of token ids."""

MAX_STRUCTURE = 100_000
"""Maximum number of strings, arrays and objects in a body: each takes about ten times as long as a number."""

MAX_FIELDS = 256
"""Maximum number of fields of a body, because each unknown field is compared with all known ones."""

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_GOT_WORDS = {**_WORDS, "bool": "a boolean"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_UNITS = {"str": "characters", "array": "items", "object": "entries"}

_PROBLEM = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_OUT_OF_BOUNDS = re.compile(r"Expected `(?P<type>[^`]*)` (?P<length>of length )?(?P<sign>[<>]=?) (?P<bound>\S+)")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHER_ENCODINGS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Decoded(Generic[Body]):
    """A request, the names of its fields that have no effect, and its fields that only other servers have
    (`other_fields.REFUSED`)."""

    body: Body
    ignored: tuple[str, ...] = ()
    unsupported: dict[str, Any] = dataclasses.field(default_factory=dict)


def require_json(content_type: str | None, content_encoding: str | None) -> None:
    """Raise `InvalidRequest` unless the headers declare the body as uncompressed JSON.

    Browsers let any web page send other content types to a local server without a preflight.
    """
    kind, _, parameters = (content_type or "").lower().partition(";")
    kind = kind.strip()
    if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        got = f"got {shortened(kind, 80)!r}" if kind else "got none"
        raise InvalidRequest(f"the Content-Type header must be application/json, {got}", param="Content-Type")
    charset = re.search(r"charset\s*=\s*\"?([^\";\s]+)", parameters)
    if charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise InvalidRequest(f"the body must be UTF-8, not {shortened(charset[1], 80)!r}", param="Content-Type")
    if (content_encoding or "identity").strip().lower() != "identity":
        raise InvalidRequest(
            f"the body must not be compressed, got Content-Encoding {shortened(content_encoding or '', 80)!r}",
            param="Content-Encoding",
        )


def decode_body(raw: bytes, body_type: type[Body], others: Collection[str] = ()) -> Decoded[Body]:
    """Decode JSON into `body_type`. `others`: names of further fields that this API accepts. Raises
    `InvalidRequest` that names the field."""
    fields = read_fields(raw)
    ignored = ignored_fields(fields, body_type, others)
    _require_sizes(fields)
    try:
        unsupported = {name: msgspec.json.decode(fields[name]) for name in ignored if name in REFUSED}
        ignored = tuple(name for name in ignored if name not in unsupported)
        return Decoded(msgspec.json.decode(raw, type=body_type), ignored, unsupported)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(raw, error) from error


def read_fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, each as undecoded JSON. Raises `InvalidRequest` if the object has a field twice, or
    is so large or deep that decoding it would take too long."""
    _require_utf8(raw)
    _require_few_values(raw)
    fields: dict[str, msgspec.Raw] = {}
    try:
        texts = read_texts(raw)
        if len(texts) > MAX_FIELDS:
            raise InvalidRequest(f"the body has {len(texts)} fields; at most {MAX_FIELDS} are accepted")
        for name, value in texts:
            if name in fields:
                raise InvalidRequest(f"{shortened(name, 80)} appears twice", param=shortened(name, 80))
            fields[name] = value
        _require_shallow(raw)
        if raw.count(b"{") > 1:
            read_object(msgspec.json.encode({name: text for name, text in fields.items() if b"{" in bytes(text)}))
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(raw, error) from error
    except RecursionError as error:
        raise _too_deep() from error
    return fields


def decode_value(raw: bytes) -> Any:
    """Decode any JSON, within the same bounds as `read_fields`. Raises `InvalidRequest`."""
    _require_few_values(raw)
    try:
        _require_shallow(raw)
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(raw, error) from error
    except RecursionError as error:
        raise _too_deep() from error


def explain(problem: str) -> InvalidRequest:
    """Turn msgspec's message (Expected `int`, got `str` - at `$.n`) into a sentence about the field."""
    match = _PROBLEM.match(problem)
    assert match is not None  # every part of the pattern is optional
    field = (match["path"] or "").replace("[...]", "")
    subject = f"a key of {field}" if match["key"] else (field or "the body")
    problem = match["problem"]
    if missing := _MISSING.match(problem):
        field = f"{field}.{missing['field']}" if field else missing["field"]
        return InvalidRequest(f"{field} is required", param=field)
    return InvalidRequest(f"{subject} {_sentence(problem)}", param=field or None)


def _sentence(problem: str) -> str:
    if wrong := _WRONG_TYPE.match(problem):
        expected = [_WORDS.get(name, name) for name in wrong["expected"].split(" | ") if name != "null"]
        return f"must be {' or '.join(expected)}, got {_GOT_WORDS.get(wrong['got'], wrong['got'])}"
    if bounds := _OUT_OF_BOUNDS.match(problem):
        verb, unit = ("have", " " + _UNITS.get(bounds["type"], "items")) if bounds["length"] else ("be", "")
        return f"must {verb} {_BOUNDS[bounds['sign']]} {bounds['bound']}{unit}"
    if choice := _CHOICE.match(problem):
        return f"cannot be {shortened(choice['value'], 80)}"
    return f"is not acceptable: {problem}"


def _require_utf8(raw: bytes) -> None:
    if raw.startswith(_OTHER_ENCODINGS) or b"\0" in raw[:4]:
        raise InvalidRequest("the body must be JSON in UTF-8, without a byte order mark")
    if raw.isascii():
        return
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: byte {error.start} is not UTF-8") from error


def _require_few_values(raw: bytes) -> None:
    """Raise `InvalidRequest` for a body with too many values, before it is decoded. Values are counted by their commas
    and brackets, also within strings; escaped quotes do not count."""
    if raw.count(b",") > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES} values; at most that many are accepted")
    num_strings = (raw.count(b'"') - raw.count(b'\\"')) // 2
    if num_strings + raw.count(b"[") + raw.count(b"{") > MAX_STRUCTURE:
        raise InvalidRequest(
            f"the body has more than {MAX_STRUCTURE} strings, arrays and objects; at most that many are accepted"
        )


def _require_shallow(raw: bytes) -> None:
    """Raise `InvalidRequest` if the JSON is nested too deeply. Goes level by level, so that no depth exhausts the
    stack."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    level = [msgspec.json.decode(raw)]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for container in level
            for inner in _containers(container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise _too_deep()


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if isinstance(value, dict | list))


def _require_sizes(fields: dict[str, msgspec.Raw]) -> None:
    for name, value in fields.items():
        max_bytes = MAX_FIELD_BYTES.get(name)
        if max_bytes is not None and (size := len(memoryview(value))) > max_bytes:
            raise InvalidRequest(f"{name} has {size} bytes; at most {max_bytes} are accepted", param=name)


def _not_json(raw: bytes, error: Exception) -> InvalidRequest:
    if _HALF_PAIR.search(raw) and (surrogate := unpaired_surrogate(raw)):
        return surrogate
    return InvalidRequest(f"the body is not valid JSON: {error}")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested too deeply: at most {MAX_DEPTH} levels are accepted")
