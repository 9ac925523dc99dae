"""The URL of a store: `scheme:location?option=value&…`.

    memory:4GiB                          file:/var/kv?max_bytes=100GiB&eviction=lru
    valkey://:password@host:6379/0       my_package.my_store:MyStore?anything=1     (a class of another package)

Read strictly: an unknown scheme or option is an error that names the nearest known one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import read_value
from kvferry.core.settings.units import parse_bytes

_SCHEME = re.compile(r"[a-z][a-z0-9+]*")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Options = TypeVar("Options", bound=msgspec.Struct)


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
    options = _options(text, query)
    if scheme in schemes and colon:
        return StoreUrl(scheme, location, options)
    if _CLASS.fullmatch(address) and ("." in scheme or not get_close_matches(scheme, schemes, n=1, cutoff=0.7)):
        return StoreUrl(address, "", options)
    near = get_close_matches(scheme, sorted(schemes), n=1, cutoff=0.5)
    hint = f"did you mean {near[0] + ':'!r}?" if near else f"known: {', '.join(sorted(schemes))}"
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ConfigError(f"store {_shown(text)!r} is not a URL such as file:/path or memory:4GiB; {hint}")
    raise ConfigError(f"store {_shown(text)!r} has an unknown scheme; {hint}")


def _options(text: str, query: str) -> dict[str, str]:
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
    types = _types(kind)
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
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The type of each option. Cached, as reading annotations takes longer than the rest of parsing a URL."""
    return {option.name: option.type for option in msgspec.structs.fields(kind)}


def _shown(text: str) -> str:
    head, at, tail = text.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if at else text
