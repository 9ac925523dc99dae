"""Stores by URL. A new one is one new file and one line here; in another package it is an entry point of the group
"kvferry.stores" (its name is the scheme), or `package.module:Class` in place of the scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint
from kvferry.store.base import KVStore, LayerStore, SharedStore, StoreOptions
from kvferry.store.codecs.table import codec_class
from kvferry.store.eviction.base import EvictionPolicy
from kvferry.store.eviction.table import eviction_class
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.url import StoreUrl, parse_store_url, read_options

VALKEY = "kvferry.store.media.valkey:ValkeyStore"
BUILTIN = {
    "memory": "kvferry.store.media.memory:MemoryStore",
    "file": "kvferry.store.media.file:FileStore",
    "valkey": VALKEY,
    "valkeys": "kvferry.store.media.valkey:TlsValkeyStore",
    "unix": VALKEY,
    "lmcache": "kvferry.store.media.lmcache:LMCacheStore",
    "mooncake": "kvferry.store.media.mooncake:MooncakeStore",
    "redis": VALKEY,
    "rediss": "kvferry.store.media.valkey:TlsValkeyStore",
}
EXTENSIONS = ExtensionPoint("store", BUILTIN, "kvferry.stores")
MAX_TIERS = 8


@dataclass(frozen=True)
class StoreSpec:
    """A store whose URL has been checked, and which is not opened yet."""

    url: StoreUrl
    kind: type[KVStore]
    options: StoreOptions

    @property
    def is_shared(self) -> bool:
        """True if other instances find the blocks and notes that this one stores."""
        return issubclass(self.kind, SharedStore)

    @property
    def has_layers(self) -> bool:
        """True if the store can read single layers of blocks."""
        return issubclass(self.kind, LayerStore)

    @property
    def uses_finishes(self) -> bool:
        """True if the store's eviction policy learns from the ends of requests."""
        eviction = getattr(self.options, "eviction", None)
        return eviction is not None and eviction_class(eviction).finish is not EvictionPolicy.finish

    def make(self, layout: KVLayout, machine: Machine = MACHINE) -> KVStore:
        """The store for one layout; `open` it before use."""
        if machine is MACHINE:
            return self.kind(self.url.location, self.options, layout)
        return self.kind(self.url.location, self.options, layout, machine)


def find_store(text: str) -> StoreSpec:
    """The store that a URL names. Raises `ConfigError` that says what is wrong with the URL."""
    is_ours = text.partition(":")[0] in EXTENSIONS.table
    url = parse_store_url(text, frozenset(EXTENSIONS.table if is_ours else EXTENSIONS.names()))
    kind: type[KVStore] = EXTENSIONS.find(url.scheme, KVStore)
    options = read_options(url, kind.options_type)
    _check_common(url, options)
    options.check(url.location)
    return StoreSpec(url, kind, options)


def find_stores(texts: str | Sequence[str]) -> list[StoreSpec]:
    """The store of one URL, or the tiers of a list, the fastest first. Raises `ConfigError`."""
    urls = [texts] if isinstance(texts, str) else list(texts)
    if not urls or len(urls) > MAX_TIERS:
        raise ConfigError(f"store: give a URL, or a list of 1 to {MAX_TIERS} of them, the fastest first")
    return [find_store(text) for text in urls]


def lossy_codecs(specs: Sequence[StoreSpec]) -> list[str]:
    """Names of the lossy codecs of these stores, sorted."""
    names = {spec.options.codec for spec in specs}
    return sorted(name for name in names if not codec_class(name).lossless)


def stored_layout(specs: Sequence[StoreSpec], layout: KVLayout) -> KVLayout:
    """The layout under which these tiers store blocks: the lossy codecs among them are part of its fingerprint, so that
    exact and lossy KV never share an arena, a directory or a key."""
    lossy = lossy_codecs(specs)
    if not lossy:
        return layout
    return msgspec.structs.replace(layout, model_fingerprint=f"{layout.model_fingerprint} by {'+'.join(lossy)}")


def hand_off_paths(specs: Sequence[StoreSpec], layout: KVLayout) -> list[str]:
    """A description of each shared tier, which can hand off blocks and markers. Two instances with none in common
    cannot hand off to each other. Equal descriptions may still mean different servers or directories."""
    layout = stored_layout(specs, layout)
    return [
        f"{spec.options.shared_name(spec.url.location) or _class_name(spec.kind)} with codec {spec.options.codec}"
        f" and layout {layout.fingerprint()}"
        for spec in specs
        if spec.is_shared
    ]


def _check_common(url: StoreUrl, options: StoreOptions) -> None:
    codec_class(options.codec)
    eviction = getattr(options, "eviction", None)
    if eviction is not None:
        eviction_class(eviction)


def _class_name(kind: type[KVStore]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
