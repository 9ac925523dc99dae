"""Objects found by name, and imported only when they are used."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from kvferry.core.errors import ConfigError, UnknownName


def resolve(path: str) -> Any:
    """The object at `package.module:attribute`. Raises `ConfigError` if it does not exist."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # also for names that no module can have
        raise ConfigError(f"cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except (AttributeError, UnicodeError) as error:
        raise ConfigError(f"module {module_name!r} has no {attribute!r}") from error


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while the body imports hundreds of modules, which then takes a fifth less time, and
    exempt the objects that exist at its end from all later collections (`gc.freeze`). For the start of a process that
    does nothing else meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class ExtensionPoint:
    """A kind of class that a configuration names, and that other packages can provide.

    A name is a key of `table` (kvferry's own classes, as `package.module:Class`), an entry point of `group`, or itself
    `package.module:Class`. `what` is the configuration key that is named in errors.
    """

    what: str
    table: Mapping[str, Any]
    group: str

    def names(self) -> list[str]:
        """All accepted names, sorted; not counting `package.module:Class`."""
        return sorted({*self.table, *entry_points(group=self.group).names})

    def has_name(self, name: str) -> bool:
        """True if it is one of `names`. Entry points are searched only if the name is not one of kvferry's own, because
        that reads the metadata of every installed package, which takes tens of milliseconds."""
        return name in self.table or name in entry_points(group=self.group).names

    def require_known(self, name: str, *also: str) -> None:
        """Raise `UnknownName` unless the name is known, or is one of `also`. Imports nothing: a name of the form
        `package.module:Class` is accepted unseen."""
        if ":" not in name and name not in also and not self.has_name(name):
            raise UnknownName(self.what, name, [*also, *self.names()])

    def find(self, name: str, kind: type) -> Any:
        """The named subclass or instance of `kind`. Raises `UnknownName`, or `ConfigError` if it cannot be imported or
        is something else."""
        target = self._load(name)
        is_kind = issubclass(target, kind) if isinstance(target, type) else isinstance(target, kind)
        if not is_kind:
            raise ConfigError(f"{self.what} {name!r} must be a kvferry {kind.__name__}, got {target!r}")
        return target

    def _load(self, name: str) -> Any:
        self.require_known(name)
        if ":" in name:
            return resolve(name)
        if name in self.table:
            builtin = self.table[name]
            return resolve(builtin) if isinstance(builtin, str) else builtin
        return entry_points(group=self.group)[name].load()
