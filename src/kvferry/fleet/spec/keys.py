"""The keys of kvferry's own settings in a spec: those of its engine in [engine], those of single roles in [role.X],
those of its router in [router], and those of all processes outside of any table.

Each is a field of a struct of settings, with the same name as its flag. Values are kept as TOML has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.flags import Kind, read_flags
from kvferry.core.settings.model import Settings, SettingsField, settings_fields, to_builtins
from kvferry.core.settings.options import read_options, read_value
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.settings import FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

SomeSettings = TypeVar("SomeSettings", bound=Settings)
Values = dict[str, Any]

SPECS_OWN = frozenset(
    {
        *("prefill", "decode", "host", "port", "workers", "backend", "address", "model"),
        *("prefill_url", "decode_url", "bootstrap_port"),
    }
)
"""Settings that a spec has under its own keys, in all tables."""


class TypedKeys(msgspec.Struct, frozen=True):
    """The keys of kvferry's own settings that a spec has, by table."""

    fleet: Values = {}
    engine: Values = {}
    router: Values = {}
    role: dict[str, Values] = {}

    def tables(self) -> dict[str, Values]:
        """The values by the name of their table; empty for the keys outside of any."""
        roles = {f"role.{role}": values for role, values in self.role.items()}
        return {"": self.fleet, "engine": self.engine, "router": self.router, **roles}


@dataclass(frozen=True)
class KeyTable:
    """The keys that a table may have: fields of `kinds`, without the names in `without`."""

    kinds: tuple[Kind, ...]
    without: Collection[str] = ()
    only: Collection[str] = ()
    """The fields of the last kind that are keys; empty: all of them."""

    def kind_of(self, key: str) -> Kind:
        """The struct of which a key is a field, also for keys of secrets, which no file may have."""
        return next(kind for kind in self.kinds if key in kind.__struct_fields__)

    def fields(self) -> dict[str, tuple[Kind, SettingsField]]:
        """The fields by their keys."""
        return {
            field.name: (kind, field)
            for kind in self.kinds
            for field in settings_fields(kind)
            if not field.secret
            and field.name not in {*SPECS_OWN, *self.without}
            and (kind is not self.kinds[-1] or not self.only or field.name in self.only)
        }


SECRETS = tuple(field.name for kind in (HttpAccess, InstanceAccess) for field in settings_fields(kind) if field.secret)
"""Settings that are secrets: no spec and no command line has them."""

ENGINE_KEYS = KeyTable((EngineConfig,))
ROUTER_KEYS = KeyTable(
    (RouterConfig, HttpLimits, InstanceAccess, HttpAccess),
    without=("declared", "tls_ca"),
)
FLEET_KEYS = KeyTable(
    (LogConfig, ListenSettings, FleetShapeSettings, InstanceSettings, HttpAccess), ("kv_transfer_config",), ("tls_ca",)
)
ROLE_KEYS = KeyTable(
    (EngineConfig, InstanceSettings, ListenSettings, LogConfig, HttpAccess, HttpLimits), ("tensor_parallel_size",)
)

ENGINE_KINDS: tuple[Kind, ...] = (
    EngineConfig,
    InstanceSettings,
    FleetShapeSettings,
    LogConfig,
    ListenSettings,
    HttpAccess,
    HttpLimits,
)
ROUTER_KINDS: tuple[Kind, ...] = (RouterConfig, InstanceAccess)


def read_keys(where: str, table: Mapping[str, Any], keys: KeyTable) -> Values:
    """The values of the keys in `table` that `keys` has. Raises `ConfigError` that names the key."""
    fields = keys.fields()
    prefix = f"{where}." if where else ""
    return {
        key: to_builtins(read_value(f"{prefix}{key}", value, fields[key][1].type))
        for key, value in table.items()
        if key in fields
    }


def flags_in(where: str, arguments: Iterable[str], kinds: tuple[Kind, ...]) -> dict[Kind, Values]:
    """The settings of the flags in `args` of a table. Raises `ConfigError`, also for a flag of a setting that the spec
    has under its own key."""
    arguments = tuple(arguments)
    values = read_flags(where, arguments, kinds)
    for read in values.values():
        for name in SPECS_OWN.intersection(read):
            raise ConfigError(f"{where}: --{name.replace('_', '-')} is set by the spec itself, under a key of its own")
    return values


def settings_from(kind: type[SomeSettings], where: str, values: Mapping[str, Any]) -> SomeSettings:
    """The settings with these values. Raises `ConfigError` that names the table."""
    try:
        return read_options(kind, {name: value for name, value in values.items() if name in kind.__struct_fields__})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error
