"""Where flags come from besides the command line, which comes first: environment variables, then `--config FILE.toml`.

[engine]    the model and its engine: for serve, prefill and decode
[router]    the router: for router and serve
[serve]     any flag of the command of that name; likewise [prefill], [decode], [router]

cyclopts reads the variables. A command that starts servers reads each variable that sets a flag of theirs, or refuses
to start: an endpoint for which `KVFERRY_API_KEY` was set would be open if the command dropped it in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.settings.flags import variable_name
from kvferry.core.settings.toml_file import read_toml
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.keys import SECRETS
from kvferry.fleet.spec.settings import EngineChoice, InstanceSettings
from kvferry.fleet.spec.variables import FLEET, INSTANCE, ROUTER, variables_of
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

Command = tuple[str, ...]

STARTS: Mapping[Command, tuple[Any, ...]] = {
    ("serve",): FLEET,
    ("prefill",): INSTANCE,
    ("decode",): INSTANCE,
    ("router",): ROUTER,
    ("picker",): ROUTER,
    ("rank",): (LogConfig,),
    ("demo",): FLEET,
    ("calibrate",): FLEET,
    ("cache", "warm"): FLEET,
    ("fleet", "apply"): FLEET,
    ("fleet", "run"): FLEET,
    ("fleet", "render"): FLEET,
    ("fleet", "recommend"): FLEET,
}
"""The settings of the processes that each command starts."""

STARTS_NOTHING: frozenset[Command] = frozenset(
    {
        *(("fleet", name) for name in ("list", "add", "drain", "remove", "role", "init")),
        *(("fleet", name) for name in ("status", "scale", "roll", "rollback", "pause", "resume", "delete", "control")),
        *(("cache", name) for name in ("simulate", "ls", "rm", "import", "stat", "verify", "pin", "unpin", "export")),
        ("trace", "record"),
        *((name,) for name in ("simulate", "plan", "why", "top", "status", "doctor")),
        *((name,) for name in ("boards", "bench", "ask", "chat", "completion")),
    }
)
"""Commands that start no server, or a server whose settings are in a ledger."""

_IGNORED_VARIABLES = frozenset({variable_name("verbose")})
"""Variables that change only the output of a command."""

FROM_A_SPEC = tuple(("fleet", name) for name in ("apply", "run", "render", "recommend"))

_SHARED = {"engine": (EngineConfig, EngineChoice, InstanceSettings), "router": (RouterConfig,)}
"""Tables that several commands read, and the settings that each may have."""

_Table = dict[str, Any]


class ConfigFile:
    """A source of flags for cyclopts, which is read once. Raises `ConfigError`, which names the file, the table and the
    key."""

    def __init__(self, path: Path, commands: Iterable[str]) -> None:
        self._path = path
        self._tables = _read_tables(path)
        for name, table in self._tables.items():
            if name not in {*commands, *_SHARED}:
                raise UnknownName(f"table in {path}:", name, {*commands, *_SHARED})
            if not isinstance(table, dict):
                raise ConfigError(f"{path}: {name} is outside of any table; put it under [engine] or [serve]")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Called by cyclopts before a command runs: set flags that are not set yet."""
        if not commands:
            return
        flags = {_field(name) for argument in arguments for name in argument.names}
        own_command = commands[-1]
        for table in (own_command, *(name for name in _SHARED if name != own_command)):
            entries = self._entries(table, flags, is_own=table == own_command)
            for command in reversed(commands):  # cyclopts looks for them under the command's name.
                entries = {command: entries}
            Dict(entries, source=f"{self._path} [{table}]")(app, commands, arguments)

    def _entries(self, table: str, flags: set[str], *, is_own: bool) -> _Table:
        """The entries of a table that are flags of this command. Raises `ConfigError` for a key that no command has."""
        known_names = flags if is_own else {name for config in _SHARED[table] for name in config.__struct_fields__}
        entries = {}
        for key, value in self._tables.get(table, {}).items():
            if _field(key) not in known_names:
                raise UnknownName(f"key in {self._path} [{table}]:", key, known_names)
            if _field(key) in flags:
                entries[key] = _as_flag(value)
        return entries


def _read_tables(path: Path) -> Mapping[str, Any]:
    try:
        return read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"--config {error}") from error


def _as_flag(value: Any) -> Any:
    """A table in place of a value is the JSON that the flag takes, such as [serve.kv_transfer_config]."""
    return json.dumps(value) if isinstance(value, dict) else value


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def refuse_unread(command: Command, app: App, *, has_file: bool = False) -> None:
    """Raise `ConfigError` for a variable that sets a flag of a process that `command` starts, if the command itself
    does not have the flag. `has_file`: flags come from a TOML file too."""
    reads_spec = command in FROM_A_SPEC
    if reads_spec and has_file:
        raise ConfigError(f"`kvferry {' '.join(command)}` takes its settings from the spec: leave out --config")
    present = sorted((variables_of(STARTS.get(command, ())) - _IGNORED_VARIABLES).intersection(os.environ))
    if not present:
        return
    read, leaf = set[str](), app
    for name in command:
        leaf = leaf[name]
    for argument in leaf.assemble_argument_collection(parse_docstring=False):
        read |= {variable_name(_field(name)) for name in argument.names}
    if unread := [name for name in present if name not in read]:
        raise ConfigError(_complaint(command, unread[0], reads_spec=reads_spec))


def _complaint(command: Command, variable: str, *, reads_spec: bool) -> str:
    field = variable.removeprefix("KVFERRY_").lower()
    remedy = "unset it for this command"
    if reads_spec and field in SECRETS:
        remedy = (
            f"a spec says it as {field}_file in [router], or in Kubernetes as a Secret in"
            f" backend.kubernetes.pod.router.secrets; {remedy}"
        )
    elif reads_spec:
        remedy = f"a spec says all settings of its fleet; {remedy}"
    return f"{variable} is set, and `kvferry {' '.join(command)}` does not read it: {remedy}"
