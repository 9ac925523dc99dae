"""`--config FILE.toml`: flags from a file. The command line and the environment come first.

[engine]    the model and its engine: for serve, prefill and decode
[router]    the router: for router and serve
[serve]     any flag of the command of that name; likewise [prefill], [decode], [router]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.settings.toml_file import read_toml
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.settings import EngineChoice, InstanceSpec
from kvferry.router.config import RouterConfig

SHARED = {"engine": (EngineConfig, EngineChoice, InstanceSpec), "router": (RouterConfig,)}
"""Tables that several commands read, and the settings each may hold."""

Table = dict[str, Any]


class ConfigFile:
    """A source of flags for cyclopts, read once. Raises `ConfigError` that names the file, the table and the key."""

    def __init__(self, path: Path, commands: Iterable[str]) -> None:
        self._path = path
        self._tables = _read(path)
        for name, table in self._tables.items():
            if name not in {*commands, *SHARED}:
                raise UnknownName(f"table in {path}:", name, {*commands, *SHARED})
            if not isinstance(table, dict):
                raise ConfigError(f"{path}: {name} is outside of any table; put it under [engine] or [serve]")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Called by cyclopts before a command runs: fill in flags that are not set yet."""
        if not commands:
            return
        flags = {_field(name) for argument in arguments for name in argument.names}
        own = commands[-1]
        for table in (own, *(name for name in SHARED if name != own)):
            entries = self._entries(table, flags, is_own=table == own)
            for command in reversed(commands):  # cyclopts looks for them under the command's name.
                entries = {command: entries}
            Dict(entries, source=f"{self._path} [{table}]")(app, commands, arguments)

    def _entries(self, table: str, flags: set[str], *, is_own: bool) -> Table:
        """The entries of a table that are flags of this command. Keys that no command has are refused."""
        known_names = flags if is_own else {name for config in SHARED[table] for name in config.__struct_fields__}
        entries = {}
        for key, value in self._tables.get(table, {}).items():
            if _field(key) not in known_names:
                raise UnknownName(f"key in {self._path} [{table}]:", key, known_names)
            if _field(key) in flags:
                entries[key] = _as_flag(value)
        return entries


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"--config {error}") from error


def _as_flag(value: Any) -> Any:
    """A table in place of a value is the JSON that the flag takes, such as [serve.kv_transfer_config]."""
    return json.dumps(value) if isinstance(value, dict) else value


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
