"""`kvferry fleet init`: a commented spec that can be applied as it is. Of the settings of kvferry's own processes,
which may also be keys of the spec, it has those that most users set."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from kvferry.core.errors import ConfigError
from kvferry.core.settings.model import field_help
from kvferry.fleet.spec.fleet_spec import (
    Backend,
    DesiredFleet,
    EngineSpec,
    FailureSpec,
    RoleSpec,
    RollSpec,
    RouterSpec,
    ScaleSpec,
    Unit,
    fleet_from,
)
from kvferry.fleet.spec.keys import ENGINE_KEYS, ROUTER_KEYS, KeyTable

_WIDTH = 78
_EXAMPLES: Mapping[str, Any] = {
    "max": 3,
    "budget": 4,
    "most_per_decode": 2.0,
    "count": 1,
    "ttft": "2s",
    "itl": "50ms",
    "api_key_file": "/etc/kvferry/api-keys",
    "max_model_len": 4096,
    "kv_cache_memory": "2GiB",
    "members": {"prefill": 1, "decode": 1},
}
"""Example values of keys that have no default, or whose default is "none"."""
_TABLES = ("engine", "role", "router", "unit", "roll", "failure", "backend", "scale", "keys")
_BACKEND_TABLES = ("kubernetes", "ray", "options")
"""Tables that only one kind of backend has. The pages of these backends describe them."""


def add_to(fleet: App) -> None:
    """Give `kvferry fleet` this command."""
    fleet.command(init)


def init(
    path: Annotated[Path | None, Parameter(help="File to create. Default: print it.")] = None,
    *,
    name: Annotated[str | None, Parameter(help="Name of the fleet. Default: that of the file, or chat.")] = None,
    model: Annotated[str, Parameter(help="Model to serve.")] = "kvferry/tiny-python",
) -> int:
    """Write a spec to begin with: the keys with their meaning, and their defaults behind a #.

    kvferry fleet init chat.toml

    kvferry fleet apply chat.toml
    """
    chosen = name or (path.stem if path is not None else "chat")
    text = "\n".join(spec_lines(chosen, model, path)) + "\n"
    fleet_from(msgspec.toml.decode(text.encode()))
    if path is None:
        sys.stdout.write(text)
        return 0
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; name another file, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    sys.stderr.write(f"kvferry: wrote {path}; next: kvferry fleet apply {path}\n")
    return 0


def spec_lines(name: str, model: str, path: Path | None = None) -> Iterator[str]:
    """The lines of a spec for one prefill and one decode instance."""
    yield f"# A fleet of kvferry's. Create it, or carry out a change:  kvferry fleet apply {path or 'FILE'}"
    yield "# A key behind a # has its default, or an example where there is none."
    yield "# [engine], [router] and roles also take the settings of kvferry's processes, by"
    yield "# the names of their flags (kvferry serve --help): max_num_seqs = 64."
    values = {"name": name, "model": model, "mode": "pooling"}
    yield from _table("", DesiredFleet, values, without=_TABLES)
    for role in ("prefill", "decode"):
        yield from _table(f"role.{role}", RoleSpec, {"count": 1}, brief=role != "prefill")
    yield from _table("router", RouterSpec, {"port": 8000})
    yield from _settings(ROUTER_KEYS)
    yield from _table("engine", EngineSpec, {})
    yield from _settings(ENGINE_KEYS)
    yield from _table("roll", RollSpec, {})
    yield from _table("failure", FailureSpec, {})
    yield from _table("backend", Backend, {}, without=_BACKEND_TABLES)
    yield from _table("scale", ScaleSpec, None)
    yield from _table("unit", Unit, None)


def _table(
    name: str,
    kind: type[msgspec.Struct],
    values: Mapping[str, Any] | None,
    without: tuple[str, ...] = (),
    *,
    brief: bool = False,
) -> Iterator[str]:
    """The lines of one table. `values`: keys that are set; None: the whole table is commented out. `brief`: only the
    keys that are set, without comments."""
    helps = field_help(kind)
    yield ""
    if name:
        if values is None:
            text = " ".join((kind.__doc__ or "").split())
            yield from (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
        yield f"{'# ' if values is None else ''}[{name}]"
    for field in msgspec.structs.fields(kind):
        if field.name in without:
            continue
        is_set = values is not None and field.name in values
        if brief and not is_set:
            continue
        if not brief and (text := helps.get(field.name, "")):
            yield from (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))
        value = values[field.name] if is_set and values is not None else _default(field)
        yield f"{'' if is_set else '# '}{field.name} = {_toml(value)}"


def _settings(keys: KeyTable) -> Iterator[str]:
    """The settings of kvferry's own processes that most users set; the reference has all of them."""
    for name, (kind, field) in keys.fields().items():
        if field.common:
            yield from (f"# {line}" for line in textwrap.wrap(field_help(kind)[name], _WIDTH, break_on_hyphens=False))
            yield f"# {name} = {_toml(_EXAMPLES[name] if field.default is None else field.default)}"


def _default(field: Any) -> Any:
    if field.default is not msgspec.NODEFAULT and field.default is not None:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return _EXAMPLES[field.name]


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case dict():
            return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
    return msgspec.json.encode(str(value)).decode()
