"""Connectors by name. A new connector is one new folder and one line here, or an entry point of another package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvferry.connectors.api import API_VERSION, ConnectorContext, SchedulerSide, StepPlan, WorkerSide
from kvferry.connectors.foreign import refuse_connector, refuse_keys
from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint, resolve
from kvferry.core.settings.options import read_options
from kvferry.core.settings.transfer_config import KVTransferConfig


@dataclass(frozen=True)
class ConnectorSpec:
    """The two classes of a connector, each as `package.module:Class`; they are imported when they are first used.

    `api_version`: the version of `kvferry.connectors.api` for which they are written, as a number; a connector for
    another version is refused. `defaults`: default values in `kv_connector_extra_config` for this name; the user's
    settings override them.
    """

    scheduler_side: str
    worker_side: str
    api_version: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings_check: str = ""
    """`package.module:function`, called with a `KVTransferConfig` before anything is started, without torch: raises
    `ConfigError` for wrong settings."""
    here_check: str = ""
    """`package.module:function`, called with a `KVTransferConfig` and `known=` (true if instances share a token) before
    an engine loads the model: raises `ConfigError` if this machine lacks what the connector needs, such as its
    address."""
    options: str = ""
    """`package.module:Class`, a `msgspec.Struct` whose fields are the keys of `kv_connector_extra_config`. It is used
    to check the keys before anything is started, and to generate the configuration reference."""

    def build_scheduler_side(self, context: ConnectorContext) -> SchedulerSide[StepPlan]:
        """A new scheduler side."""
        return self.scheduler_class()(self._completed(context))

    def build_worker_side(self, context: ConnectorContext) -> WorkerSide[StepPlan]:
        """A new worker side."""
        return self.worker_class()(self._completed(context))

    def scheduler_class(self) -> type[SchedulerSide[StepPlan]]:
        """The class of the scheduler side."""
        side_class: type[SchedulerSide[StepPlan]] = resolve(self.scheduler_side)
        return side_class

    def worker_class(self) -> type[WorkerSide[StepPlan]]:
        """The class of the worker side."""
        side_class: type[WorkerSide[StepPlan]] = resolve(self.worker_side)
        return side_class

    def check(self, config: KVTransferConfig) -> None:
        """Raise `ConfigError` for wrong settings."""
        config = self.completed(config)
        if self.options:
            own_keys = {option.encode_name for option in msgspec.structs.fields(resolve(self.options))}
            refuse_keys(config.kv_connector_extra_config, own_keys)
        if self.settings_check:
            resolve(self.settings_check)(config)
        if self.options:
            read_options(resolve(self.options), config.kv_connector_extra_config)

    def check_here(self, config: KVTransferConfig, *, has_token: bool) -> None:
        """Raise `ConfigError` like `check`, and also if this machine lacks something that the connector needs.
        `has_token`: instances share a token."""
        self.check(config)
        if self.here_check:
            resolve(self.here_check)(self.completed(config), has_token=has_token)

    def _completed(self, context: ConnectorContext) -> ConnectorContext:
        return replace(context, config=self.completed(context.config))

    def completed(self, config: KVTransferConfig) -> KVTransferConfig:
        """The configuration with `defaults` added."""
        extras = {**self.defaults, **config.kv_connector_extra_config}
        return msgspec.structs.replace(config, kv_connector_extra_config=extras)


P2P = ConnectorSpec(
    "kvferry.connectors.p2p.scheduler:P2pSchedulerSide",
    "kvferry.connectors.p2p.worker:P2pWorkerSide",
    API_VERSION,
    settings_check="kvferry.transport.lookup_buffer.base:check",
    here_check="kvferry.transport.lookup_buffer.base:check_here",
    options="kvferry.transport.options:TransportOptions",
)
KV_STORE = ConnectorSpec(
    "kvferry.connectors.kv_store.scheduler:KVStoreSchedulerSide",
    "kvferry.connectors.kv_store.worker:KVStoreWorkerSide",
    API_VERSION,
    settings_check="kvferry.connectors.kv_store.settings:check",
    here_check="kvferry.connectors.kv_store.settings:check_here",
    options="kvferry.connectors.kv_store.settings:StoreSettings",
)
LMCACHE = replace(KV_STORE, options="kvferry.connectors.kv_store.lmcache_settings:LMCacheSettings")
VLLM_HAND_OFF_CONNECTORS = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "MoRIIOConnector",
)
"""vLLM's own connectors that make tickets."""

BUILTIN: dict[str, ConnectorSpec] = {
    "P2pConnector": P2P,
    "P2pNcclConnector": replace(P2P, defaults={"transport": "nccl"}),
    "NixlConnector": replace(P2P, defaults={"transport": "nixl"}),
    "MooncakeConnector": replace(P2P, defaults={"transport": "mooncake"}),
    "KVStoreConnector": KV_STORE,
    "SharedStorageConnector": KV_STORE,
    "OffloadingConnector": replace(KV_STORE, defaults={"cpu_bytes_to_use": "1GiB"}),
    "LMCacheConnector": LMCACHE,
    "LMCacheConnectorV1": LMCACHE,
    "MultiConnector": ConnectorSpec(
        "kvferry.connectors.multi.scheduler:MultiSchedulerSide",
        "kvferry.connectors.multi.worker:MultiWorkerSide",
        API_VERSION,
        settings_check="kvferry.connectors.multi.settings:check",
        here_check="kvferry.connectors.multi.settings:check_here",
        options="kvferry.connectors.multi.settings:MultiOptions",
    ),
}


CONNECTORS = ExtensionPoint("kv_connector", BUILTIN, "kvferry.connectors")
"""`ConnectorSpec`s of other packages: entry points of this group, or `module:attribute`."""


def connector_names() -> list[str]:
    """All names that `find_connector` knows without a module path."""
    return CONNECTORS.names()


def find_connector(config: KVTransferConfig) -> ConnectorSpec:
    """The connector that a configuration names: one of `CONNECTORS`, or with `kv_connector_module_path` the attribute
    of that name in that module.

    Raises `UnknownName` with the nearest known name. Raises `ConfigError` for a connector of another system, if the
    module has no such spec, and if the spec is for another version of the API.
    """
    module, name = config.kv_connector_module_path, config.kv_connector
    if not module and not CONNECTORS.has_name(name):
        refuse_connector(name)
    spec: ConnectorSpec = CONNECTORS.find(f"{module}:{name}" if module else name, ConnectorSpec)
    if spec.api_version != API_VERSION:
        raise ConfigError(
            f"kv_connector {name!r} is written for version {spec.api_version} of the connector API, this kvferry has"
            f" version {API_VERSION}: compare it with kvferry.connectors.api, and set ConnectorSpec.api_version"
        )
    return spec
