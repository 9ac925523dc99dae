"""Addresses of processes, as `HOST:PORT`."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvferry.core.errors import ConfigError


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Host and port of `10.0.0.1:7000` or `[fd00::1]:7000`. Raises `ConfigError` that names `name`."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != text or "@" in text:
        raise ConfigError(f"{name} must be HOST:PORT, such as 10.0.0.1:7000, got {text[:80]!r}")
    return host, port
