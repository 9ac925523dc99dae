"""The reference of a fleet's spec, made from its structs and from the settings that its tables have as keys."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import msgspec

from docs_site.tables import code, default_text, table, type_text
from kvferry.core.settings.model import field_help
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.fleet.spec.keys import ENGINE_KEYS, FLEET_KEYS, ROLE_KEYS, ROUTER_KEYS, KeyTable
from kvferry.fleet.spec.kubernetes_spec import KubernetesSpec, PodSpec, Toleration
from kvferry.fleet.spec.ray_spec import ActorSpec

HEAD = """# The spec of a fleet

A spec is a TOML file that [`kvferry fleet apply`](../fleet.md) and its other commands take. Every table and key is on
this page, which is made from the code. A key that is unknown, or whose value is out of bounds, is refused in one line.

Settings of kvferry's own processes have the same names as their [flags](commands.md), with underscores. Secrets are in
no spec: it names the files that have them.

```toml
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
log_format = "json"

[engine]
max_num_seqs = 64

[role.prefill]
count = 1
max_num_batched_tokens = 512

[role.decode]
count = 2

[router]
port = 8000
api_key_file = "/etc/kvferry/api-keys"
```
"""

NESTED: dict[str, type[msgspec.Struct]] = {
    "backend.kubernetes": KubernetesSpec,
    "backend.kubernetes.pod.ROLE": PodSpec,
    "backend.kubernetes.pod.ROLE.tolerations": Toleration,
    "backend.ray.ROLE": ActorSpec,
}
SETTINGS = {"": FLEET_KEYS, "engine": ENGINE_KEYS, "role.ROLE": ROLE_KEYS, "router": ROUTER_KEYS}


def page() -> str:
    return HEAD + "".join(_section(name, kind) for name, kind in tables().items())


def tables() -> dict[str, type[msgspec.Struct]]:
    """The structs of all tables by their names; empty for the keys outside of any."""
    found: dict[str, type[msgspec.Struct]] = {"": DesiredFleet}
    for field in msgspec.structs.fields(DesiredFleet):
        if (kind := _struct(field.type)) is not None and field.name != "keys":
            found["role.ROLE" if field.name == "role" else field.name] = kind
    return {**found, **NESTED}


def _struct(hint: Any) -> type[msgspec.Struct] | None:
    """The struct that a field holds, as its value or as the values of a table."""
    if get_origin(hint) is dict:
        return _struct(get_args(hint)[1])
    if get_origin(hint) in (Union, types.UnionType):
        return next((kind for part in get_args(hint) if (kind := _struct(part)) is not None), None)
    return hint if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _section(name: str, kind: type[msgspec.Struct]) -> str:
    about = "" if kind is DesiredFleet else f"{inspect.getdoc(kind)}\n\n"
    text = f"\n## {f'[{name}]' if name else 'Outside of any table'}\n\n{about}"
    text += table(("key", "type", "default", "meaning"), _rows(kind))
    if name in SETTINGS:
        text += f"\nSettings of kvferry's own processes{_whose(name)}:\n\n"
        text += table(("key", "type", "default", "meaning"), _settings(SETTINGS[name]))
    return text


def _whose(name: str) -> str:
    return {
        "": ", for all of them",
        "engine": ", for all instances of kvferry's engine",
        "role.ROLE": ", for the instances of kvferry's engine in this role; they override those of the other tables",
        "router": ", for the routers",
    }[name]


def _rows(kind: type[msgspec.Struct]) -> Iterator[list[str]]:
    helps = field_help(kind)
    for field in msgspec.structs.fields(kind):
        if _struct(field.type) is not None and not helps.get(field.name):
            continue  # a table, which has a section of its own
        if kind is DesiredFleet and field.name == "keys":
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else None
        is_plain = _struct(field.type) is None
        yield [
            code(field.encode_name),
            type_text(field.type) if is_plain else "table",
            "required" if field.required else default_text(default),
            helps.get(field.name, ""),
        ]


def _settings(keys: KeyTable) -> Iterator[list[str]]:
    for name, (kind, field) in keys.fields().items():
        yield [code(name), type_text(field.type), default_text(field.default), field_help(kind)[name]]
