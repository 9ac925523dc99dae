"""Settings of the engine's HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.settings.bounds import Count
from kvferry.http.server.config import HttpConfig


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpConfig):
    """Where the server listens, its limits, and how it stops."""

    max_choices: Count = 128
    """Most answers one request may ask for: its prompts times its n."""
