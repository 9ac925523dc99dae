"""The router that a command talks to, as flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Addresses to listen on to which one cannot connect, and this machine's addresses in place of them."""


@dataclass(frozen=True, kw_only=True)
class RouterAddress:
    """The router, and the key for it."""

    router: str = "http://127.0.0.1:8000"
    """URL of the router; with --admin-port, of its admin listener."""

    admin_key: str | None = None
    """Admin key of the router. Default: requests are signed with KVFERRY_AUTH_TOKEN, or with the token that kvferry
    keeps for this user on this machine."""

    tls_ca: Path | None = None
    """Certificate authorities (PEM) of a router at an https:// URL. Default: the system's authorities."""


def reachable_url(url: str) -> str:
    """The URL with an address to which this machine can connect, in place of a wildcard address."""
    parts = urlsplit(url)
    host = WILDCARDS.get(parts.hostname or "")
    return url if host is None else parts._replace(netloc=f"{host}:{parts.port}").geturl()
