"""Reads flags of settings from a list of arguments: `args` of a fleet's spec. The command line itself is cyclopts'."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from kvferry.core.errors import ConfigError
from kvferry.core.settings.model import Settings, SettingsField, settings_fields
from kvferry.core.settings.options import read_value, unknown_key

Kind = type[Settings]
Values = Mapping[str, Any]


def flag_name(field: str) -> str:
    """The flag of a field, as cyclopts spells it."""
    return "--" + field.replace("_", "-")


def flag_of(argument: str) -> str:
    """The flag in an argument, however it is spelt; `--no-x` is `--x`."""
    return argument.partition("=")[0].replace("_", "-").replace("--no-", "--")


def variable_name(field: str) -> str:
    """The environment variable of a field's flag."""
    return "KVFERRY_" + field.upper()


def read_flags(where: str, arguments: Sequence[str], kinds: Collection[Kind]) -> dict[Kind, dict[str, Any]]:
    """The fields that these flags set, by the struct they belong to: of two with one name, the first of `kinds`. Raises
    `ConfigError` that begins with `where`."""
    flags = _flags(kinds)
    values: dict[Kind, dict[str, Any]] = {kind: {} for kind in kinds}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, text = argument.partition("=")
        flag = name.replace("_", "-")
        kind, field = flags.get(flag, (None, None))
        if kind is None or field is None:
            kind, field = flags.get(flag_of(argument), (None, None))
            if kind is None or field is None or not _is_bool(field.type) or has_value:
                raise ConfigError(unknown_key(f"{where}: {argument[:60]!r}", flag, list(flags), "flag"))
            values[kind][field.name] = False
            continue
        if _is_bool(field.type) and not has_value:
            values[kind][field.name] = True
            continue
        if not has_value:
            if not remaining:
                raise ConfigError(f"{where}: {flag} requires an argument")
            text = remaining.pop(0)
        if not text:
            raise ConfigError(f"{where}: {flag} must not be empty; leave it out to have its default")
        if _is_list(field.type):
            values[kind][field.name] = (*values[kind].get(field.name, ()), text)
        else:
            values[kind][field.name] = text
    for kind, read in values.items():
        types = {field.name: field.type for field in settings_fields(kind)}
        for name, value in read.items():
            read[name] = read_value(f"{where}: {flag_name(name)}", value, types[name])
    return values


def to_flags(values: Values) -> list[str]:
    """Flags that give fields these values, which are as in TOML. None is left out."""
    return [argument for name, value in values.items() for argument in _to_flag(flag_name(name), value)]


def overridden(arguments: Iterable[str], others: Sequence[str]) -> list[str]:
    """`arguments` without the flags that `others` set too, and their values; then `others`."""
    flags = {flag_of(argument) for argument in others}
    remaining, is_overridden = list[str](), False
    for argument in arguments:
        is_overridden = flag_of(argument) in flags if argument.startswith("--") else is_overridden
        if not is_overridden:
            remaining.append(argument)
    return [*remaining, *others]


def _to_flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [name if value else "--no-" + name.removeprefix("--")]
    if isinstance(value, tuple | list):
        return [f"{name}={item}" for item in value]
    return [f"{name}={value}"]


def _flags(kinds: Collection[Kind]) -> dict[str, tuple[Kind, SettingsField]]:
    flags: dict[str, tuple[Kind, SettingsField]] = {}
    for kind in kinds:
        for field in settings_fields(kind):
            for name in (field.name, field.alias):
                if name:
                    flags.setdefault(flag_name(name), (kind, field))
    return flags


def _plain(hint: Any) -> Any:
    """The type in an annotation, without None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return next((_plain(part) for part in get_args(hint) if part is not type(None)), hint)
    return hint


def _is_bool(hint: Any) -> bool:
    return _plain(hint) is bool


def _is_list(hint: Any) -> bool:
    return get_origin(_plain(hint)) is tuple
