"""Settings of the engine's HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.http.config import HttpConfig


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpConfig):
    """Where the server listens, what it accepts and how it ends."""

    max_choices: int = 128
    """Most answers one request may ask for: its prompts times its n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_choices < 1:
            raise ConfigError(f"max_choices must be at least 1, got {self.max_choices}")
