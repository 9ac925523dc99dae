"""`kvferry completion`: the shell's completion of commands, flags, and names of fleets, instances and servers."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvferry.cli.router_address import reachable_url
from kvferry.cli.running import running_commands
from kvferry.core.errors import KvferryError
from kvferry.fleet.places import fleet_names, ledger_of

if TYPE_CHECKING:
    from cyclopts import App

Shell = Literal["bash", "zsh", "fish"]


_ZSH_END = """
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _cyclopts_kvferry "$@"
else
  compdef _cyclopts_kvferry kvferry
fi
"""
"""The library's script only defines the function: a file in `fpath` is called by its own name, and one that is read
with `source` has to register it."""


def add_completion(app: App) -> None:
    """Give the command line this command."""

    def completion(shell: Annotated[Shell, Parameter(help="The shell.")]) -> int:
        r"""Print a script that makes a shell complete kvferry's commands, flags and names.

        kvferry completion bash \
          > ~/.local/share/bash-completion/completions/kvferry

        kvferry completion zsh > "${fpath[1]}/_kvferry"

        kvferry completion fish > ~/.config/fish/completions/kvferry.fish
        """
        for name in app:
            if not name.startswith("-"):
                app[name]  # imports it
        sys.stdout.write(app.generate_completion(shell=shell) + (_ZSH_END if shell == "zsh" else ""))
        return 0

    app.command(completion, sort_key=90)


def fleets(context: Any) -> list[str]:
    """Names of this user's fleets."""
    with suppress(KvferryError, OSError):
        return fleet_names()
    return []


def instances(context: Any) -> list[str]:
    """Names of the instances of this user's fleets and commands, as far as they are recorded on this machine."""
    names: dict[str, None] = {}
    for fleet in fleets(context):
        with suppress(KvferryError, OSError):
            seen = ledger_of(fleet).status()
            names |= dict.fromkeys(member.name for member in (seen.members if seen else ()) if member.role != "router")
    for record in running_commands():
        names |= dict.fromkeys(record.instances)
    return list(names)


def urls(context: Any) -> list[str]:
    """URLs of this user's fleets and commands that serve on this machine."""
    addresses = []
    for fleet in fleets(context):
        with suppress(KvferryError, OSError):
            seen = ledger_of(fleet).status()
            if seen is not None and seen.url:
                addresses.append(seen.url)
    return [*addresses, *(reachable_url(record.url) for record in running_commands())]
