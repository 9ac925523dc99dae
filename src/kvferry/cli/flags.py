"""Command line flags from frozen dataclasses. The fields are the flags, their docstrings the help, their defaults the
defaults; nothing is written twice."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, Field, asdict, field, fields, make_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import Group, Parameter

from kvferry.core.errors import ConfigError

T = TypeVar("T")


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


def flags_of(config: type, without: Iterable[str] = (), sort_key: int = 0) -> type[Any]:
    """A dataclass with the fields of `config` that are flags, annotated for cyclopts. A field whose metadata has a
    `heading` begins a group of flags; the groups of `config` come in its order, at `sort_key` among all others.

    It is a class of its own because cyclopts makes the object, and an error in a setting is to be raised where it can
    be shown to the user in one line: by `complete`.
    """
    helps, hints, skipped = field_help(config), get_type_hints(config), set(without)
    views: list[tuple[str, Any, Any]] = []
    group: Group | None = None
    for number, flag_field in enumerate(fields(config)):
        if "heading" in flag_field.metadata:
            group = Group(flag_field.metadata["heading"], sort_key=sort_key + number / 1000)
        if flag_field.name not in skipped:
            parameter = _parameter(flag_field, helps[flag_field.name], group)
            views.append((flag_field.name, Annotated[hints[flag_field.name], parameter], _default(flag_field)))
    # Of the module of `config`, not of this one: cyclopts takes a class of the standard library for a leaf.
    namespace = {"__module__": config.__module__}
    return make_dataclass(f"{config.__name__}Flags", views, frozen=True, kw_only=True, namespace=namespace)


def defaults_of(flags: type[T]) -> T:
    """The flags with all their defaults."""
    return flags()


def complete(config: type[T], flags: Any, **more: Any) -> T:
    """The settings of the flags, with the fields that are no flags. Raises `ConfigError`."""
    values = asdict(flags)
    for name, value in (values | more).items():
        flag = f"--{name.replace('_', '-')}"
        if value == "" or (isinstance(value, tuple | list) and "" in value):  # often a variable that was not set
            raise ConfigError(f"{flag} must not be empty; leave it out to have its default")
    return config(**(values | more))


def _parameter(field: Field[Any], text: str, group: Group | None) -> Parameter:
    # No --empty-… for lists. No "default: ()" and "default: None": they are what not giving the flag means.
    alias = field.metadata.get("alias")
    grouped: dict[str, Any] = {} if group is None else {"group": group}  # None would hide its command's group
    return Parameter(
        help=text,
        alias=None if alias is None else f"--{alias}",
        negative_iterable=(),
        show_default=field.default not in ((), None),
        **grouped,
    )


def _default(flag_field: Field[Any]) -> Any:
    if flag_field.default_factory is not MISSING:
        return field(default_factory=flag_field.default_factory)
    return field() if flag_field.default is MISSING else field(default=flag_field.default)
