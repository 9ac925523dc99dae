"""Options that a user writes as JSON, read into a frozen `msgspec.Struct`.

The fields are the keys (under the `name` that `msgspec.field` gives some), their annotations the types, their defaults
the defaults, and the docstring under each field is its meaning in the configuration reference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import require_number

Options = TypeVar("Options", bound=msgspec.Struct)

EXTRA = "kv_connector_extra_config"


def read_options(kind: type[Options], given: Mapping[str, Any], where: str = EXTRA) -> Options:
    """The options in `given`, with defaults for the others. `where` is how errors name the JSON object they are in.

    Raises `ConfigError` that names the key: one that is unknown (with the nearest known one), one whose value is of
    another type, or one that is missing.
    """
    fields = _fields(kind)
    for key in given:
        if key not in fields:
            raise ConfigError(unknown_key(f"{where}.{key}", key, fields))
    for name, one in fields.items():
        if one.required and name not in given:
            raise ConfigError(f"{where}.{name} is required")
    values = {key: read_value(f"{where}.{key}", value, fields[key].type) for key, value in given.items()}
    return kind(**{fields[key].name: value for key, value in values.items()})


@cache
def _fields(kind: type[msgspec.Struct]) -> Mapping[str, msgspec.structs.FieldInfo]:
    """The fields by their keys; their annotations are read once."""
    return {one.encode_name: one for one in msgspec.structs.fields(kind)}


def read_value(where: str, value: Any, wanted: Any) -> Any:
    """A value of the type `wanted`. Raises `ConfigError` that begins with `where`."""
    try:
        found = msgspec.convert(value, wanted, strict=False)
    except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
        if (unknown := _unknown_choice(where, value, wanted)) is not None:
            raise ConfigError(unknown) from error
        bounds = _bounds(wanted) if isinstance(value, int | float | str) else ""
        raise ConfigError(
            f"{where}: must be {bounds}, got {str(value)[:40]}" if bounds else f"{where}: {error}"
        ) from error
    require_number(f"{where}:", found)
    return found


def _unknown_choice(where: str, value: Any, wanted: Any) -> str | None:
    """What is wrong with a value of which only some are known; None: it is another thing that is wrong."""
    choices = _choices(wanted)
    told = value if isinstance(value, list | tuple | dict) else [value]
    wrong = next((one for one in told if choices and isinstance(one, str) and one not in choices), None)
    return None if wrong is None else unknown_key(f"{where}: {wrong[:40]!r}", wrong[:40], choices, "value")


def _choices(wanted: Any) -> tuple[str, ...]:
    """The texts of which a value, the values of a list or the keys of a table are to be one; empty: any."""
    if get_origin(wanted) is Literal:
        return tuple(one for one in get_args(wanted) if isinstance(one, str))
    kinds = get_args(wanted)[:1] if get_origin(wanted) in (Annotated, tuple, list, dict) else ()
    kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else kinds
    return tuple(choice for kind in kinds for choice in _choices(kind))


def _bounds(wanted: Any) -> str:
    """The bounds of a number or what a text is to be, in words; empty if there are none."""
    if get_origin(wanted) in (Union, UnionType):
        return next((found for part in get_args(wanted) if (found := _bounds(part))), "")
    if get_origin(wanted) is not Annotated:
        return ""
    for meta in get_args(wanted)[1:]:
        if meta.pattern is not None and meta.description:
            return str(meta.description)
        if meta.gt is not None:
            most = "" if meta.le is None else f" and at most {meta.le:g}"
            return f"greater than {meta.gt:g}{most if meta.lt is None else f' and less than {meta.lt:g}'}"
        if meta.ge is not None:
            return f"at least {meta.ge:g}" if meta.le is None else f"{meta.ge:g} to {meta.le:g}"
    return ""


def unknown_key(where: str, key: str, known: Collection[str], what: str = "key") -> str:
    """The error message for a key (or `what` it is) that does not exist: it names the nearest known one, or all of
    them."""
    near = get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{where} is not a known {what}; {hint}"
