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
from kvferry.core.settings.model import decode_hook

Options = TypeVar("Options", bound=msgspec.Struct)

EXTRA = "kv_connector_extra_config"


def read_options(kind: type[Options], values_by_key: Mapping[str, Any], where: str = EXTRA) -> Options:
    """The options in `values_by_key`, with defaults for the others. `where` names their JSON object in errors.

    Raises `ConfigError` that names the key: one that is unknown (with the nearest known one), one whose value is of
    another type, or one that is missing.
    """
    fields = _fields(kind)
    for key in values_by_key:
        if key not in fields:
            raise ConfigError(unknown_key(f"{where}.{key}", key, fields))
    for name, field in fields.items():
        if field.required and name not in values_by_key:
            raise ConfigError(f"{where}.{name} is required")
    values = {key: read_value(f"{where}.{key}", value, fields[key].type) for key, value in values_by_key.items()}
    return kind(**{fields[key].name: value for key, value in values.items()})


@cache
def _fields(kind: type[msgspec.Struct]) -> Mapping[str, msgspec.structs.FieldInfo]:
    """The fields by their keys, cached."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def read_value(where: str, value: Any, value_type: Any) -> Any:
    """A value of the type `value_type`. Raises `ConfigError` that begins with `where`."""
    try:
        converted = msgspec.convert(value, value_type, strict=False, dec_hook=decode_hook)
    except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
        if (unknown := _unknown_choice(where, value, value_type)) is not None:
            raise ConfigError(unknown) from error
        bounds = _bounds(value_type) if isinstance(value, int | float | str) else ""
        raise ConfigError(
            f"{where}: must be {bounds}, got {str(value)[:40]}" if bounds else f"{where}: {error}"
        ) from error
    require_number(f"{where}:", converted)
    return converted


def _unknown_choice(where: str, value: Any, value_type: Any) -> str | None:
    """The error for a value that is not one of the known choices; None: something else is wrong with it."""
    choices = _choices(value_type)
    values = value if isinstance(value, list | tuple | dict) else [value]
    wrong = next((entry for entry in values if choices and isinstance(entry, str) and entry not in choices), None)
    return None if wrong is None else unknown_key(f"{where}: {wrong[:40]!r}", wrong[:40], choices, "value")


def _choices(value_type: Any) -> tuple[str, ...]:
    """The strings that are accepted as the value, as values of a list or as keys of a table; empty: any."""
    if get_origin(value_type) is Literal:
        return tuple(value for value in get_args(value_type) if isinstance(value, str))
    kinds = get_args(value_type)[:1] if get_origin(value_type) in (Annotated, tuple, list, dict) else ()
    kinds = get_args(value_type) if get_origin(value_type) in (Union, UnionType) else kinds
    return tuple(choice for kind in kinds for choice in _choices(kind))


def _bounds(value_type: Any) -> str:
    """The bounds of a number or the form of a string, in words; empty if there are none."""
    if get_origin(value_type) in (Union, UnionType):
        return next((bounds for part in get_args(value_type) if (bounds := _bounds(part))), "")
    if get_origin(value_type) is not Annotated:
        return ""
    for meta in get_args(value_type)[1:]:
        if meta.pattern is not None and meta.description:
            return str(meta.description)
        if meta.gt is not None:
            upper = "" if meta.le is None else f" and at most {meta.le:g}"
            return f"greater than {meta.gt:g}{upper if meta.lt is None else f' and less than {meta.lt:g}'}"
        if meta.ge is not None:
            return f"at least {meta.ge:g}" if meta.le is None else f"{meta.ge:g} to {meta.le:g}"
    return ""


def unknown_key(where: str, key: str, known_keys: Collection[str], noun: str = "key") -> str:
    """The error message for an unknown key (or another `noun`): it names the nearest known one, or all of them."""
    near = get_close_matches(key, known_keys, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known_keys)}"
    return f"{where} is not a known {noun}; {hint}"
