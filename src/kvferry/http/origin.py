"""Where a client connects to."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.core.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port of a server; `host` without brackets."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, url: str, flag: str = "the URL") -> Origin:
        """Of `http://host:port` or `https://…`, with no path. Raises `ConfigError` that names `flag`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{flag} {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{flag} {url!r} must look like http://HOST:PORT")
        if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"{flag} {url!r} must be scheme, host and port alone")
        return cls(parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https")

    @property
    def authority(self) -> str:
        """For the `host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"
