"""The settings of `LMCacheConnector`: LMCache's own names of tiers, translated to kvferry's stores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import quote

import msgspec

from kvferry.connectors.kv_store.settings import StoreSettings, store_url
from kvferry.core.errors import ConfigError

GIB = 2**30
_SCHEMES = {"lm": "lmcache", "mooncakestore": "mooncake"}
"""LMCache's schemes of `remote_url` that have another name in kvferry. Other schemes have the same name."""
_SUPPORTED = ("lmcache", "redis", "rediss", "valkey", "valkeys", "unix", "mooncake")
_EXTRA = "kv_connector_extra_config"


class LMCacheSettings(StoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `LMCacheConnector`. The first tier is memory, the next one the disk, the last one
    the server."""

    local_cpu: bool = msgspec.field(default=True, name="lmcache.local_cpu")
    """True if host memory is the first tier."""

    max_local_cpu_size: float = msgspec.field(default=5.0, name="lmcache.max_local_cpu_size")
    """Size in GiB of the tier in host memory."""

    local_disk: str = msgspec.field(default="", name="lmcache.local_disk")
    """A directory that is the next tier. It may begin with `file://`."""

    max_local_disk_size: float = msgspec.field(default=0.0, name="lmcache.max_local_disk_size")
    """Maximum size of this directory in GiB. Required with `lmcache.local_disk`."""

    remote_url: str = msgspec.field(default="", name="lmcache.remote_url")
    """A server that is the last tier: `lm://host:port` (`lmcache_server`), `redis://`, `rediss://`, `valkey://`,
    `mooncakestore://`."""

    chunk_size: int = msgspec.field(default=0, name="lmcache.chunk_size")
    """Has no effect: KV is kept in blocks of the engine's size."""

    def store_key(self) -> str:
        """The key that names the stores: "lmcache.*", unless another key names them."""
        store_key = super().store_key()
        return store_key if store_key in ("store", "shared_storage_path", "num_cpu_blocks") else "lmcache.*"

    def keys_read(self) -> Collection[str]:
        """`lmcache.chunk_size` never has an effect, so it is accepted beside all other keys."""
        if self.store_key() != "lmcache.*":
            return (*super().keys_read(), "lmcache.chunk_size")
        keys = [option.encode_name for option in msgspec.structs.fields(type(self))]
        eviction_keys = ["eviction_policy"] if self.local_cpu or self.local_disk else []
        return [*(key for key in keys if key.startswith("lmcache.")), "codec", *eviction_keys]

    def _urls(self, engine_block_size: int) -> str | Sequence[str]:
        if self.store_key() != "lmcache.*":
            return super()._urls(engine_block_size)
        options = {"eviction": self.eviction_policy, "codec": self.codec}
        tiers = []
        if self.local_cpu:
            size = _gib(self.max_local_cpu_size, "lmcache.max_local_cpu_size")
            tiers.append(store_url(f"memory:{size}", options))
        if self.local_disk:
            size = _gib(self.max_local_disk_size, "lmcache.max_local_disk_size")
            path = quote(self.local_disk.removeprefix("file://"), safe="/~:@")
            tiers.append(store_url(f"file:{path}", options | {"max_bytes": size}))
        if self.remote_url:
            tiers.append(store_url(_server(self.remote_url), {"codec": self.codec}))
        if not tiers:
            raise ConfigError(f"{_EXTRA}: no store is left to keep KV in; set lmcache.local_cpu or lmcache.remote_url")
        return tiers


def _gib(size: float, key: str) -> int:
    if not 0 < size < 2**30:
        raise ConfigError(f"{_EXTRA}.{key} must be greater than 0 (GiB), got {size:g}")
    return int(size * GIB)


def _server(url: str) -> str:
    scheme, colon, rest = url.partition("://")
    name = _SCHEMES.get(scheme, scheme)
    if not colon or name not in _SUPPORTED:
        supported = ", ".join(f"{prefix}://" for prefix in (*_SCHEMES, *_SUPPORTED))
        raise ConfigError(f"{_EXTRA}.lmcache.remote_url: {scheme!r} is not a supported server; supported: {supported}")
    return f"{name}://{rest}"
