"""The server that a client connects to."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.hand_off import HOST_PATTERN


class Origin(msgspec.Struct, frozen=True):
    """Scheme, host and port of a server; `host` without brackets, in ASCII."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, url: str, flag: str = "the URL") -> Origin:
        """Parse `http://host:port` or `https://…`, without a path. Raises `ConfigError` that names `flag`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{flag} {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{flag} {url!r} must look like http://HOST:PORT")
        host = _in_ascii(parts.hostname)
        if re.match(HOST_PATTERN, host) is None:
            raise ConfigError(f"{flag} {url!r}: {parts.hostname!r} is neither a name nor an address of a machine")
        if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"{flag} {url!r} must be scheme, host and port only, as in http://HOST:PORT")
        return cls(host, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https")

    @property
    def authority(self) -> str:
        """Host and port as in a `host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"


def _in_ascii(host: str) -> str:
    """The host in IDNA form, as it is sent; unchanged if it has no such form."""
    try:
        return host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        return host
