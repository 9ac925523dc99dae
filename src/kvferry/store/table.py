"""Stores by URL. A new one is one new file and one line here; in another package an entry point of the group
"kvferry.stores" (its name is the scheme), or plainly `package.module:Class` in place of the scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.layout import KVLayout
from kvferry.core.names import ExtensionPoint
from kvferry.store.base import KVStore, StoreOptions
from kvferry.store.codecs.table import codec_class
from kvferry.store.eviction.base import EvictionPolicy
from kvferry.store.eviction.table import eviction_class
from kvferry.store.url import StoreUrl, parse_store_url, read_options

VALKEY = "kvferry.store.valkey:ValkeyStore"
BUILTIN = {
    "memory": "kvferry.store.memory:MemoryStore",
    "file": "kvferry.store.file:FileStore",
    "valkey": VALKEY,
    "valkeys": "kvferry.store.valkey:TlsValkeyStore",
    "unix": VALKEY,
    "lmcache": "kvferry.store.lmcache:LMCacheStore",
    "mooncake": "kvferry.store.mooncake:MooncakeStore",
    "redis": VALKEY,
    "rediss": "kvferry.store.valkey:TlsValkeyStore",
}
EXTENSIONS = ExtensionPoint("store", BUILTIN, "kvferry.stores")
MAX_TIERS = 8


@dataclass(frozen=True)
class StoreSpec:
    """A store that was named, checked, and not made yet."""

    url: StoreUrl
    kind: type[KVStore]
    options: StoreOptions

    @property
    def hears_finishes(self) -> bool:
        """Whether the store's eviction policy learns from the ends of requests."""
        eviction = getattr(self.options, "eviction", None)
        return eviction is not None and eviction_class(eviction).finish is not EvictionPolicy.finish

    def make(self, layout: KVLayout) -> KVStore:
        """The store of one layout; `open` it."""
        return self.kind(self.url.location, self.options, layout)


def find_store(text: str) -> StoreSpec:
    """The store that a URL names. Raises `ConfigError` that says what of it is wrong."""
    url = parse_store_url(text, frozenset(EXTENSIONS.names()))
    kind: type[KVStore] = EXTENSIONS.find(url.scheme, KVStore)
    options = read_options(url, kind.options_type)
    _check_common(url, options)
    kind.check(url.location, options)
    return StoreSpec(url, kind, options)


def find_stores(texts: str | Sequence[str]) -> list[StoreSpec]:
    """One URL, or the tiers of a list, the fastest first."""
    named = [texts] if isinstance(texts, str) else list(texts)
    if not named or len(named) > MAX_TIERS:
        raise ConfigError(f"store: give a URL, or a list of 1 to {MAX_TIERS} of them, the fastest first")
    return [find_store(text) for text in named]


def lossy_codecs(specs: Sequence[StoreSpec]) -> list[str]:
    """Names of the codecs among them that do not give back the same bits, in one order."""
    names = {spec.options.codec for spec in specs}
    return sorted(name for name in names if not codec_class(name).lossless)


def layout_kept_by(specs: Sequence[StoreSpec], layout: KVLayout) -> KVLayout:
    """The layout under which these tiers keep blocks: its fingerprint names the lossy codecs among them, so that exact
    and lossy KV share no arena, folder or key."""
    lossy = lossy_codecs(specs)
    if not lossy:
        return layout
    return msgspec.structs.replace(layout, model_fingerprint=f"{layout.model_fingerprint} by {'+'.join(lossy)}")


def _check_common(url: StoreUrl, options: StoreOptions) -> None:
    codec_class(options.codec)
    eviction = getattr(options, "eviction", None)
    if eviction is not None:
        eviction_class(eviction)
    if not options.deadline_s > 0:
        raise ConfigError(f"store {url}: deadline_s must be greater than 0, got {options.deadline_s:g}")
    max_bytes = getattr(options, "max_bytes", None)
    if max_bytes is not None and max_bytes <= 0:
        raise ConfigError(f"store {url}: max_bytes must be greater than 0; leave it out for no bound")
