"""Makes command line flags from the structs of settings (`core.settings.model`), so that each setting is written
once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, field, make_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import Group, Parameter

from kvferry.cli.help import settings_group
from kvferry.core.errors import ConfigError
from kvferry.core.settings.model import Settings, SettingsField, field_help, settings_fields

T = TypeVar("T")


def flags_of(
    config: type[Settings], without: Iterable[str] = (), sort_key: int = 0, has_common: bool = True
) -> type[Any]:
    """A dataclass with the fields of `config` that are flags, annotated for cyclopts. A field with a `heading` begins a
    group of flags; the groups of `config` come in its order, at `sort_key` among all others. Without
    `has_common`, those with a `heading` are in `--help-all` only.

    It is a class of its own because cyclopts makes the object, and an error in a setting is to be raised where it can
    be shown to the user in one line: by `complete`.
    """
    helps, hints, skipped = field_help(config), get_type_hints(config), set(without)
    views: list[tuple[str, Any, Any]] = []
    group: Group | None = None
    kinds = (config,) if has_common else ()
    for number, setting in enumerate(settings_fields(config)):
        if setting.heading:
            group = settings_group(setting.heading, sort_key + number / 1000, *kinds)
        if setting.name not in skipped:
            parameter = _parameter(setting, helps[setting.name], group)
            default = field() if setting.required else field(default=setting.default)
            views.append((setting.name, Annotated[hints[setting.name], parameter], default))
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
        if value == "" or (
            isinstance(value, tuple | list) and "" in value
        ):  # often because a shell variable was not set
            raise ConfigError(f"{flag} must not be empty; leave it out to have its default")
    return config(**(values | more))


def _parameter(setting: SettingsField, text: str, group: Group | None) -> Parameter:
    # No --empty-… for lists. No "default: ()" and "default: None": they are what not giving the flag means.
    grouped: dict[str, Any] = {} if group is None else {"group": group}  # None would hide the group of its command
    return Parameter(
        help=text,
        alias=f"--{setting.alias}" if setting.alias else None,
        negative_iterable=(),
        show_default=setting.default not in ((), None),
        **grouped,
    )
