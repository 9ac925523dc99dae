"""The classes that vLLM builds, one for each of kvferry's connectors."""

from __future__ import annotations

from functools import cache

from kvferry.adapters.vllm.versions import require_tested
from kvferry.connectors.api import HandsOff
from kvferry.connectors.registry import connector_names, find_connector
from kvferry.core.errors import UnknownName
from kvferry.core.settings.transfer_config import KVTransferConfig

PREFIX = "Kvferry"


def class_names() -> list[str]:
    """The values of `kv_connector` in vLLM's configuration."""
    return [PREFIX + name for name in connector_names()]


@cache
def connector_class(name: str) -> type:
    """The class with this name. It is always the same object, since vLLM compares classes.

    Raises `UnknownName` with the nearest known one, and `ConfigError` for a release of vLLM that this adapter was not
    tested with.
    """
    if name not in class_names():
        raise UnknownName("kv_connector", name, class_names())
    require_tested()
    from kvferry.adapters.vllm.connector import KvferryConnector, KvferryGroupsConnector

    connector_name = name.removeprefix(PREFIX)
    spec = find_connector(KVTransferConfig(kv_connector=connector_name))
    side = spec.scheduler_class()
    # `takes_parts`: the deprecated name
    takes_sections = issubclass(side, HandsOff) and (side.takes_sections or getattr(side, "takes_parts", False))
    base = KvferryGroupsConnector if takes_sections else KvferryConnector
    return type(name, (base,), {"__module__": "kvferry.adapters.vllm", "connector_name": connector_name})
