"""Stores by URL: `scheme:location?option=value&…`.

    memory:4GiB                          file:/var/kv?max_bytes=100GiB&eviction=lru
    valkey://:password@host:6379/0       my_package.my_store:MyStore?anything=1     (a class of another package)

An unknown scheme or option in a URL is an error, which names the nearest known one. A new store is one new file and one
line here. A store of another package is an entry point of the group "kvferry.stores" (its name is the scheme), or
`package.module:Class` in place of the scheme.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint
from kvferry.core.settings.options import read_value
from kvferry.core.settings.units import parse_bytes
from kvferry.store.base import KVStore, LayerStore, SharedStore, StoreOptions
from kvferry.store.codecs.table import codec_class
from kvferry.store.eviction.base import EvictionPolicy
from kvferry.store.eviction.table import eviction_class
from kvferry.store.machine import MACHINE, Machine

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

_SCHEME_NAME = re.compile(r"[a-z][a-z0-9+]*")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True)
class StoreSpec:
    """A store whose URL has been checked, and which is not opened yet."""

    url: StoreUrl
    kind: type[KVStore]
    options: StoreOptions

    @property
    def is_shared(self) -> bool:
        """True if other instances find the blocks and notes of the store."""
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
        """Make the store for one layout. Call its `open` before use."""
        if machine is MACHINE:
            return self.kind(self.url.location, self.options, layout)
        return self.kind(self.url.location, self.options, layout, machine)


def find_store(text: str) -> StoreSpec:
    """The store that a URL names. Raises `ConfigError` for mistakes in the URL."""
    is_builtin = text.partition(":")[0] in EXTENSIONS.table
    url = parse_store_url(text, frozenset(EXTENSIONS.table if is_builtin else EXTENSIONS.names()))
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


@dataclass(frozen=True)
class StoreUrl:
    """The parts of a URL. For a class of another package, `scheme` is "module:Class" and `location` is empty."""

    scheme: str
    location: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        """The URL without its password."""
        head, at, tail = self.location.rpartition("@")
        slashes = "//" if head.startswith("//") else ""
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        location = f":{slashes}***@{tail}" if at else f":{self.location}"
        return self.scheme + (location if self.location else "") + (f"?{query}" if query else "")


def parse_store_url(text: str, schemes: frozenset[str]) -> StoreUrl:
    """Parse a URL. Raises `ConfigError`, which names the nearest one of `schemes` if there is one."""
    address, _, query = text.partition("?")
    scheme, colon, location = address.partition(":")
    if location.startswith("//:") and "@" in query:
        raise ConfigError(f"store {_shown(text)!r}: a ? in a password is written as %3F, or use password_file")
    options = _split_options(text, query)
    if scheme in schemes and colon:
        return StoreUrl(scheme, location, options)
    if _CLASS.fullmatch(address) and ("." in scheme or not get_close_matches(scheme, schemes, n=1, cutoff=0.7)):
        return StoreUrl(address, "", options)
    near = get_close_matches(scheme, sorted(schemes), n=1, cutoff=0.5)
    hint = f"did you mean {near[0] + ':'!r}?" if near else f"known: {', '.join(sorted(schemes))}"
    if not colon or not _SCHEME_NAME.fullmatch(scheme):
        raise ConfigError(f"store {_shown(text)!r} is not a URL such as file:/path or memory:4GiB; {hint}")
    raise ConfigError(f"store {_shown(text)!r} has an unknown scheme; {hint}")


def _split_options(text: str, query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=64)
    except ValueError as error:
        raise ConfigError(f"store {_shown(text)!r}: options are written as ?name=value&name=value") from error
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"store {_shown(text)!r} has an option twice")
    return options


def read_options(url: StoreUrl, kind: type[Options]) -> Options:
    """A store's options with their types; names that end in `_bytes` take sizes such as 4GiB. Raises `ConfigError`."""
    types = _option_types(kind)
    values: dict[str, Any] = {}
    for name, value in url.options.items():
        if name not in types:
            near = get_close_matches(name, types, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(types)}"
            raise ConfigError(f"store {url}: unknown option {name!r}; {hint}")
        where = f"store {url}: {name}"
        text = parse_bytes(value, where) if name.endswith("_bytes") else value
        values[name] = read_value(where, text, types[name])
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"store {url}: {error}") from error


@cache
def _option_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The type of each option. Cached, as reading annotations takes longer than the rest of parsing a URL."""
    return {option.name: option.type for option in msgspec.structs.fields(kind)}


def _shown(text: str) -> str:
    head, at, tail = text.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if at else text
