"""The model of settings: a frozen struct, whose fields are flags, keys of TOML tables, environment variables, and the
document that a process is started with.

A field has its type, its default and its bounds in its annotation; the docstring under it is its help, in `--help` and
in the reference. Times are seconds, and sizes are text such as 512MiB.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvferry.core.settings.bounds import check_bounds

Kind = TypeVar("Kind")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one part of a process. Raises `ConfigError` for a number out of bounds."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={getattr(self, field.name)!r}" for field in settings_fields(type(self)) if not field.secret
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def heading(text: str) -> msgspec.Meta:
    """Annotation of the first field of a group of flags in `--help` and in the reference."""
    return msgspec.Meta(extra={"heading": text})


def alias(flag: str) -> msgspec.Meta:
    """Annotation of a field that has a second flag, without its dashes."""
    return msgspec.Meta(extra={"alias": flag})


COMMON = msgspec.Meta(extra={"common": True})
"""Annotation of a field that many users set: its flag is in `--help`. The other flags are only in `--help-all`."""

SECRET = msgspec.Meta(extra={"secret": True})
"""Annotation of a secret. kvferry itself writes it into no command line, no spec file and no log; users may give it by
a flag, which others on the machine can read."""


@dataclass(frozen=True)
class SettingsField:
    """One field. `default` is None where it is made anew for each object; `required` fields have none."""

    name: str
    type: Any
    default: Any
    required: bool
    heading: str = ""
    alias: str = ""
    secret: bool = False
    common: bool = False


@cache
def settings_fields(kind: type[msgspec.Struct]) -> tuple[SettingsField, ...]:
    """The fields of a struct in their order, cached."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        SettingsField(
            name=field.name,
            type=hints[field.name],
            default=None if field.default is msgspec.NODEFAULT else field.default,
            required=field.required,
            **_extra(hints[field.name]),
        )
        for field in msgspec.structs.fields(kind)
    )


def changed(settings: Settings, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that differ from their defaults, as values of TOML. Fields that are required or have a default factory
    are always among them."""
    return {
        field.name: to_builtins(value)
        for field in settings_fields(type(settings))
        if field.name not in without and (value := getattr(settings, field.name)) != field.default
    }


def to_builtins(value: Any) -> Any:
    """A value or a struct as TOML and JSON have it: paths are strings."""
    return msgspec.to_builtins(value, enc_hook=_encoded)


def encode(document: msgspec.Struct) -> bytes:
    """A struct of settings as JSON, for `decode` in another process."""
    return msgspec.json.encode(document, enc_hook=_encoded)


def decode(content: bytes, kind: type[Kind]) -> Kind:
    """The struct that `encode` was given. Raises `msgspec.ValidationError`, and `ConfigError` for values that
    contradict each other."""
    return msgspec.json.decode(content, type=kind, dec_hook=decode_hook)


def decode_hook(kind: type, value: Any) -> Any:
    """msgspec's hook for the types of settings that JSON does not have."""
    if kind is Path:
        if isinstance(value, str):
            return Path(value)
        raise ValueError(f"expected a path as text, got {type(value).__name__}")
    raise NotImplementedError(f"no setting is a {kind.__name__}")


def _encoded(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no setting is a {type(value).__name__}")


def _extra(hint: Any) -> dict[str, Any]:
    """The values of `heading`, `alias`, `SECRET` and `COMMON` in an annotation."""
    if get_origin(hint) is not Annotated:
        return {}
    names = ("heading", "alias", "secret", "common")
    extras = (meta.extra for meta in get_args(hint)[1:] if isinstance(meta, msgspec.Meta) and meta.extra)
    return {key: value for extra in extras for key, value in extra.items() if key in names}


def field_help(config: type) -> dict[str, str]:
    """The docstring under each field of a class and of its bases, on one line. Python keeps them in the source only."""
    helps: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if vars(kind).get("__annotations__"):
            helps |= _own_field_help(kind)
    return helps


def _own_field_help(config: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    helps: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                helps[name] = " ".join(text.split())
    return helps
