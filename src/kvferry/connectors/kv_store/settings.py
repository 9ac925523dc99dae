"""The settings of the cache connector, under all its names. They are read and checked once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import msgspec

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.registry import BUILTIN, KV_STORE, find_connector
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import resolve
from kvferry.core.settings.bounds import MAX_SECONDS
from kvferry.core.settings.options import read_options
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.core.settings.units import parse_bytes
from kvferry.store.codecs.table import codec_class
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.table import StoreSpec, find_stores, lossy_codecs
from kvferry.store.tiered.tiers import TieredStore


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `KVStoreConnector` and its other names. Times are in seconds; sizes are texts such
    as 4GiB, or numbers.

    One key names the stores: `store`, `shared_storage_path`, `num_cpu_blocks` or `cpu_bytes_to_use`. A key that is read
    only with another of these is an error, so that no setting is ignored.
    """

    store: str | list[str] | None = None
    """A URL, or a list of tiers, the fastest first."""

    shared_storage_path: str = ""
    """A directory that all instances share."""

    num_cpu_blocks: int | None = None
    """Host memory for this many blocks of `block_size` tokens."""

    block_size: int | None = None
    """The number of tokens in the blocks that `num_cpu_blocks` counts, a multiple of the engine's block size. Default:
    the engine's block size. Has no effect on `cpu_bytes_to_use`."""

    cpu_bytes_to_use: int | str | None = None
    """Host memory of this size."""

    eviction_policy: str | None = None
    """Eviction policy, unless `store` is used. Default: the store's default."""

    codec: str | None = None
    """Encoding of blocks, unless `store` is used. Default: unchanged."""

    max_bytes: int | str = 0
    """With `shared_storage_path`: maximum size of the directory. If it is exceeded, blocks are removed. 0: no limit."""

    fsync: bool = False
    """With `shared_storage_path`: write blocks to the disk before they are announced, so that they survive a power
    failure."""

    access: Literal["owner", "group"] = "owner"
    """With `shared_storage_path`: access to it, for this user only (`owner`) or also its group (`group`)."""

    write: Literal["through", "back"] = "through"
    """With several tiers: a block counts as stored when all of them have it (`through`), or when the first has it
    (`back`)."""

    load: Literal["async", "layerwise", "auto"] = "async"
    """"async": a request waits for its whole load. "layerwise": the model starts at once and waits for each layer; all
    tiers must be able to read single layers. "auto": layerwise if measured speeds say that this gains more time than it
    costs other requests."""

    load_policy: Literal["always", "measured"] = "always"
    """"always": all stored blocks are loaded. "measured" (kvferry's own engine): blocks are computed again if that is
    quicker: all of them, the blocks that only slow tiers have, or the first ones while the others are loaded."""

    prefetch: bool = True
    """True if blocks in lower tiers are copied to the first one while their request is queued."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 30.0
    """Maximum seconds to wait for a hand-off's prefill, and for the blocks of one request."""

    key_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 7 * 24 * 3600.0
    """Seconds after which a key that a request stored (`kvcache_store_keys`) expires, unless the request sets a shorter
    time (`kvcache_ttl_s`)."""

    key_wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] | None = None
    """Maximum seconds to wait for a missing key that a request loads (`kvcache_load_keys`). Default and maximum:
    `timeout_s`."""

    @property
    def max_key_wait_s(self) -> float:
        """Maximum seconds to wait for missing keys."""
        return self.timeout_s if self.key_wait_s is None else min(self.key_wait_s, self.timeout_s)

    def store_key(self) -> str:
        """The key that names the stores; empty if none does."""
        return next((key for key in _KEYS_READ_WITH if getattr(self, key) not in (None, "")), "")

    def keys_read(self) -> Collection[str]:
        """The keys about stores that are read with this `store_key`."""
        return (self.store_key(), *_KEYS_READ_WITH.get(self.store_key(), ()))

    def specs(self, engine_block_size: int = 1) -> list[StoreSpec]:
        """The stores, checked. Raises `ConfigError`."""
        return find_stores(self._urls(engine_block_size))

    def open_later(self, layout: KVLayout, machine: Machine = MACHINE) -> TieredStore:
        """The stores of one rank as one."""
        return TieredStore(self.specs(layout.block_size), layout, self.write, machine)

    def _urls(self, engine_block_size: int) -> str | Sequence[str]:
        locations = [self.store, self.shared_storage_path, self.num_cpu_blocks]
        if sum(value not in (None, "") for value in locations) > 1:
            raise ConfigError(
                "kv_connector_extra_config: give one of store, shared_storage_path and num_cpu_blocks, not several"
            )
        if self.store is not None:
            return self.store
        options = {"eviction": self.eviction_policy, "codec": self.codec}
        if self.shared_storage_path:
            max_bytes = _bytes(self.max_bytes, "max_bytes") or None
            file_options = {"max_bytes": max_bytes, "fsync": "true" if self.fsync else None, "access": self.access}
            return store_url(
                "file:" + quote(self.shared_storage_path, safe="/~:@", errors="surrogateescape"), options | file_options
            )
        if self.num_cpu_blocks is not None:
            return store_url("memory:", options | {"num_blocks": self._num_engine_blocks(engine_block_size)})
        if self.cpu_bytes_to_use is not None:
            return store_url(f"memory:{_bytes(self.cpu_bytes_to_use, 'cpu_bytes_to_use')}", options)
        raise ConfigError(
            "kv_connector_extra_config.store is missing: name a store, such as memory:4GiB, file:/path or"
            " valkey://host:port, or a list of them, the fastest first"
        )

    def _num_engine_blocks(self, engine_block_size: int) -> int:
        assert self.num_cpu_blocks is not None
        if self.num_cpu_blocks < 1:
            raise ConfigError(f"kv_connector_extra_config.num_cpu_blocks must be at least 1, got {self.num_cpu_blocks}")
        size = engine_block_size if self.block_size is None else self.block_size
        if size < 1 or size % engine_block_size:
            raise ConfigError(
                f"kv_connector_extra_config.block_size must be a multiple of the engine's block size"
                f" {engine_block_size}, got {size}"
            )
        return self.num_cpu_blocks * (size // engine_block_size)


def read_settings(context: ConnectorContext) -> StoreSettings:
    """Parse the configuration. Raises `ConfigError`, which names the key."""
    settings = _read(context.config)
    settings.specs(context.layout.block_size)
    if settings.load != "async" and context.layout.tp_size > 1:
        raise ConfigError(
            f"kv_connector_extra_config.load {settings.load} works on one rank only: where one rank's blocks do not"
            " come, the others would keep what they computed without them; leave it out, or serve without tensor"
            " parallelism"
        )
    return settings


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all mistakes that can be found before there is an engine."""
    _read(config).specs()


def check_here(config: KVTransferConfig, *, has_token: bool) -> None:
    """Raise `ConfigError` if a store's folder or memory, or the library of its codec, is not available. Servers may be
    started later."""
    for spec in _read(config).specs():
        codec_class(spec.options.codec).require_libraries()
        spec.options.check_here(spec.url.location)


def lossy_names(config: KVTransferConfig) -> list[str]:
    """The lossy codecs of the stores. Raises `ConfigError`."""
    return lossy_codecs(_read(config).specs())


def settings_class(connector: str) -> type[StoreSettings]:
    """The class of the settings of a connector of this name, from the registry."""
    spec = BUILTIN.get(connector, KV_STORE)
    settings_type: type[StoreSettings] = resolve(spec.options)
    return settings_type


def _read(config: KVTransferConfig) -> StoreSettings:
    extra_config = config.kv_connector_extra_config
    for key, names in _CHOICES.items():
        if extra_config.get(key, names[0]) not in names:
            raise UnknownName(f"kv_connector_extra_config.{key}", str(extra_config[key]), names)
    settings: StoreSettings = read_options(settings_class(config.kv_connector), extra_config)
    if config.kv_connector == "SharedStorageConnector" and not (settings.shared_storage_path or settings.store):
        raise ConfigError(
            "SharedStorageConnector needs kv_connector_extra_config.shared_storage_path: a directory that all"
            " instances share"
        )
    _require_read(settings, config)
    return settings


def _require_read(settings: StoreSettings, config: KVTransferConfig) -> None:
    """Raise `ConfigError` for a key that would be ignored, unless it is a default of the connector's name."""
    defaults, read = find_connector(config).defaults, settings.keys_read()
    for key, value in config.kv_connector_extra_config.items():
        is_set = value not in (None, "") and value != defaults.get(key)
        if is_set and is_about_stores(key) and key not in read:
            raise ConfigError(
                f"kv_connector_extra_config.{key} is not read with {settings.store_key()}; {_hint(key, value)}"
            )


def is_about_stores(key: str) -> bool:
    """True if a key is about stores and is only read with some of the keys that name stores. `StoreSettings.specs`
    refuses two keys that name stores."""
    return key.startswith("lmcache.") or key in _EXCLUSIVE_KEYS


def _hint(key: str, value: Any) -> str:
    if key in _IN_URL:
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"write it in the store's URL (store): …?{_IN_URL[key]}={shown}"
    if key == "cpu_bytes_to_use":
        return f"name a store of that size, store: memory:{value}, or leave out one of the two"
    return "leave out one of the two"


_KEYS_READ_WITH: dict[str, tuple[str, ...]] = {
    "store": (),
    "shared_storage_path": ("eviction_policy", "codec", "max_bytes", "fsync", "access"),
    "num_cpu_blocks": ("eviction_policy", "codec", "block_size"),
    "cpu_bytes_to_use": ("eviction_policy", "codec", "block_size"),
}
"""The keys that name stores, and for each of them the other keys that are read with it. The first one that is set
counts."""
_EXCLUSIVE_KEYS = {"cpu_bytes_to_use"}.union(*_KEYS_READ_WITH.values())
_IN_URL = {"eviction_policy": "eviction"} | {name: name for name in ("codec", "max_bytes", "fsync", "access")}
"""Keys that are options of a store's URL, by the names of these options."""
_CHOICES = {
    "write": ("through", "back"),
    "load": ("async", "layerwise", "auto"),
    "load_policy": ("always", "measured"),
    "access": ("owner", "group"),
}


def _bytes(size: int | str, key: str) -> int:
    num_bytes = parse_bytes(size, f"kv_connector_extra_config.{key}") if isinstance(size, str) else size
    if num_bytes < 0:
        raise ConfigError(f"kv_connector_extra_config.{key} must be at least 0, got {num_bytes}")
    return num_bytes


def store_url(address: str, options: dict[str, Any]) -> str:
    """The URL of a store, with the options that are set."""
    query = {name: value for name, value in options.items() if value is not None}
    return f"{address}?{urlencode(query)}" if query else address
