"""Environment variables that set flags of servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.core.settings.flags import variable_name
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

SERVER: tuple[Any, ...] = (ListenSettings, HttpAccess, HttpLimits, LogConfig)
"""Settings of all processes that listen."""
INSTANCE: tuple[Any, ...] = (EngineConfig, EngineChoice, InstanceSettings, *SERVER)
ROUTER: tuple[Any, ...] = (RouterConfig, InstanceAccess, *SERVER)
FLEET: tuple[Any, ...] = (*INSTANCE, RouterConfig, InstanceAccess, FleetShapeSettings, RestartPolicy)

CONFIG_VARIABLE = "KVFERRY_CONFIG"


def variables_of(configs: Iterable[Any]) -> frozenset[str]:
    """The environment variables that set the fields of these dataclasses."""
    return frozenset(variable_name(name) for config in configs for name in config.__struct_fields__)


def flag_variables() -> frozenset[str]:
    """The environment variables that set flags of any member of a fleet."""
    return variables_of(FLEET) | {CONFIG_VARIABLE}
