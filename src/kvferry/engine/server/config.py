"""Settings of the engine's HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.settings.bounds import Count
from kvferry.http.server.config import HttpConfig


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpConfig):
    """Address, limits and shutdown of the server."""

    max_choices: Count = 128
    """Max number of choices of one request: its prompts times its n."""
