"""Objects by name, imported on use, so that nothing is imported before it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from kvferry.core.errors import ConfigError, UnknownName


def resolve(path: str) -> Any:
    """The object at `package.module:attribute`; `ConfigError` when it is not there."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # also of names that no module can have
        raise ConfigError(f"cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except (AttributeError, UnicodeError) as error:
        raise ConfigError(f"module {module_name!r} has no {attribute!r}") from error


@dataclass(frozen=True)
class ExtensionPoint:
    """A place where a configuration names a class, which may be another package's.

    A name is one of `table` (ours, by `package.module:Class`), an entry point of `group`, or itself `module:Class`.
    `what` is the key in the configuration, for errors.
    """

    what: str
    table: Mapping[str, Any]
    group: str

    def names(self) -> list[str]:
        """All that have a name."""
        return sorted({*self.table, *entry_points(group=self.group).names})

    def require_known(self, name: str, *also: str) -> None:
        """Raise `UnknownName` unless there is one of that name, or it is one of `also`. Imports nothing, so what is
        named `module:Class` is taken as it is."""
        if ":" not in name and name not in (*also, *self.names()):
            raise UnknownName(self.what, name, [*also, *self.names()])

    def find(self, name: str, kind: type) -> Any:
        """The subclass of `kind`, or instance of it, that is named. Raises `UnknownName`, or `ConfigError` when it
        cannot be imported or is something else."""
        found = self._load(name)
        is_kind = issubclass(found, kind) if isinstance(found, type) else isinstance(found, kind)
        if not is_kind:
            raise ConfigError(f"{self.what} {name!r} must be a kvferry {kind.__name__}, got {found!r}")
        return found

    def _load(self, name: str) -> Any:
        self.require_known(name)
        if ":" in name:
            return resolve(name)
        if name in self.table:
            ours = self.table[name]
            return resolve(ours) if isinstance(ours, str) else ours
        return entry_points(group=self.group)[name].load()
