"""The reference of `--kv-transfer-config`, made from its class and from the options of every connector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from docs_site.tables import code, default_text, table, type_text
from kvferry.adapters.vllm.settings import AdapterOptions
from kvferry.connectors.registry import BUILTIN, ConnectorSpec
from kvferry.core.names import resolve
from kvferry.core.settings.model import field_help
from kvferry.core.settings.transfer_config import KVTransferConfig

HEAD = """# KV transfer configuration

`--kv-transfer-config` takes vLLM's JSON object, with the same keys. An unknown key is an error
at start that names the nearest known one.

```bash
kvferry serve kvferry/tiny-python --prefill 1 --decode 1 \\
  --kv-transfer-config '{"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": "tcp"}}'
```

## Keys

"""

EXTRA = """
## kv_connector_extra_config

The keys depend on the connector. For a connector of another package, see its own documentation.
"""

INSIDE_VLLM = """
## Inside vLLM

In vLLM the connectors' names begin with `Kvferry` (`KvferryP2pConnector`). The keys outside of
`kv_connector_extra_config` are vLLM's own; inside it, these stand beside the connector's:

"""


def page() -> str:
    connectors = "".join(_connectors(names) for names in by_options())
    return HEAD + keys(KVTransferConfig) + EXTRA + connectors + INSIDE_VLLM + keys(AdapterOptions)


def by_options() -> list[list[str]]:
    """Names of the built-in connectors, those that have the same options together."""
    groups: dict[str, list[str]] = {}
    for name, spec in BUILTIN.items():
        groups.setdefault(spec.options, []).append(name)
    return list(groups.values())


def keys(kind: type[Any]) -> str:
    """A table of the fields of a `msgspec.Struct`."""
    return table(("key", "type", "default", "meaning"), _rows(kind))


def _rows(kind: type[Any]) -> Iterator[list[str]]:
    helps = {name: text for base in _structs(kind) for name, text in field_help(base).items()}
    for one in msgspec.structs.fields(kind):
        default = "required" if one.required else default_text(_default(one))
        yield [code(one.encode_name), type_text(one.type), default, helps[one.name]]


def _structs(kind: type[Any]) -> Iterator[type[Any]]:
    """The class and those that it has fields from, these first."""
    yield from (
        base for base in reversed(kind.__mro__) if base is not msgspec.Struct and issubclass(base, msgspec.Struct)
    )


def _default(one: Any) -> Any:
    return None if one.default is msgspec.NODEFAULT else one.default


def _connectors(names: list[str]) -> str:
    spec: ConnectorSpec = BUILTIN[names[0]]
    defaults = "".join(f"\n{_defaults(name)}\n" for name in names if BUILTIN[name].defaults)
    return f"\n### {', '.join(names)}\n{defaults}\n{keys(resolve(spec.options))}"


def _defaults(name: str) -> str:
    said = ", ".join(f"`{key}` is `{value}`" for key, value in BUILTIN[name].defaults.items())
    return f"With `{name}`, {said} unless something else is given."
