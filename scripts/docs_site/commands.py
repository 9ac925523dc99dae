"""The reference of the command line, made from the commands' own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from cyclopts import App, Argument, Group

from docs_site.tables import code, default_text, table, type_text
from kvferry.cli.main import app

HEAD = """# Command line

Every flag can be set in three places. The command line wins, then the environment, then the file:

- on the command line, `--max-num-seqs 64`;
- by an environment variable, named `KVFERRY_` and the flag in capitals: `KVFERRY_MAX_NUM_SEQS=64`;
- in a TOML file that `--config` (or `KVFERRY_CONFIG`) names. The table `[engine]` is read by `serve`, `prefill` and
  `decode`, the table `[router]` by `serve` and `router`; a table of a command's name, such as `[serve]`, holds any of
  its flags. Keys are flags with or without dashes: `max_num_seqs = 64`.

Flags of type *true or false* are given without a value, and turned off with `--no-…`. Flags of type *list* are given
once for each value.
"""


def page() -> str:
    return HEAD + "".join(_command(name, command) for name, command in commands().items())


def commands(group: App = app, before: str = "") -> dict[str, App]:
    """All commands by name, those of a group by both names: "serve", "fleet list"."""
    found: dict[str, App] = {}
    for name in group:
        if name.startswith("-"):
            continue
        one = group[name]
        found |= commands(one, f"{before}{name} ") if one.default_command is None else {before + name: one}
    return found


def flags(command: App) -> list[Argument]:
    """What a command's `--help` shows, in its order."""
    shown = [one for one in command.assemble_argument_collection(parse_docstring=True) if one.show]
    return sorted(shown, key=lambda one: _group(one)[0])


def variable(flag: Argument) -> str:
    """The environment variable that sets a flag."""
    return "KVFERRY_" + flag.name.removeprefix("--").replace("-", "_").upper()


def _command(name: str, command: App) -> str:
    about = inspect.getdoc(command.default_command) or ""
    parts = [f"\n## kvferry {name}\n\n{about}\n"]
    for (_, title), group in groupby(flags(command), _group):
        parts.append(
            f"\n### {title} {{: #{name.replace(' ', '-')}-{title.lower().replace(':', '').replace(' ', '-')} }}\n\n"
        )
        parts.append(table(("flag", "type", "default", "meaning"), map(_row, group)))
    return "".join(parts)


def _group(flag: Argument) -> tuple[float, str]:
    [group] = flag.parameter.group or ()  # type: ignore[misc]
    assert isinstance(group, Group)
    order = group._sort_key if isinstance(group._sort_key, int | float) else 0
    return order, group.name


def _row(flag: Argument) -> Iterator[str]:
    names = [name for name in flag.names if not name.startswith("--no-")]
    yield "<br>".join(map(code, names))
    yield type_text(flag.hint)
    yield "required" if flag.required else default_text(_default(flag))
    yield flag.parameter.help or ""


def _default(flag: Argument) -> Any:
    default = flag.field_info.default
    return None if default is inspect.Parameter.empty else default
