"""A command that starts servers reads each environment variable that sets a flag of theirs, or refuses to start.

An endpoint for which `KVFERRY_API_KEY` was set would be open if the command dropped it in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cyclopts import App

from kvferry.core.errors import ConfigError
from kvferry.core.settings.flags import variable_name
from kvferry.fleet.spec.keys import SECRETS
from kvferry.fleet.spec.variables import FLEET, INSTANCE, ROUTER, variables_of
from kvferry.observe.logs import LogConfig

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
"""The settings of what each command starts."""

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
"""Commands that start no server, or one whose settings a ledger has."""

_HARMLESS = frozenset({variable_name("verbose")})
"""Variables that change nothing but what a command shows."""

FROM_A_SPEC = tuple(("fleet", name) for name in ("apply", "run", "render", "recommend"))


def refuse_unread(command: Command, app: App, *, has_file: bool = False) -> None:
    """Raise `ConfigError` for a variable that sets a flag of what `command` starts, and that the command itself does
    not have. `has_file`: flags come from a TOML file too."""
    reads_spec = command in FROM_A_SPEC
    if reads_spec and has_file:
        raise ConfigError(f"`kvferry {' '.join(command)}` takes its settings from the spec: leave out --config")
    present = sorted((variables_of(STARTS.get(command, ())) - _HARMLESS).intersection(os.environ))
    if not present:
        return
    read, leaf = set[str](), app
    for name in command:
        leaf = leaf[name]
    for argument in leaf.assemble_argument_collection(parse_docstring=False):
        read |= {variable_name(name.lstrip("-").replace("-", "_")) for name in argument.names}
    if unread := [name for name in present if name not in read]:
        raise ConfigError(_complaint(command, unread[0], reads_spec=reads_spec))


def _complaint(command: Command, variable: str, *, reads_spec: bool) -> str:
    field = variable.removeprefix("KVFERRY_").lower()
    how = "unset it for this command"
    if reads_spec and field in SECRETS:
        how = (
            f"a spec says it as {field}_file in [router], or in Kubernetes as a Secret in"
            f" backend.kubernetes.pod.router.secrets; {how}"
        )
    elif reads_spec:
        how = f"a spec says all settings of its fleet; {how}"
    return f"{variable} is set, and `kvferry {' '.join(command)}` does not read it: {how}"
