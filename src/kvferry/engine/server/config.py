"""Settings of the engine's HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.core.openai import MAX_BODY_BYTES


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens, what it accepts and how it ends."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""

    port: int = 8000
    """Port to listen on; 0 takes any free one."""

    max_body_bytes: int = MAX_BODY_BYTES
    """Longest request body, in bytes; a longer one is answered with 413."""

    max_choices: int = 128
    """Most answers one request may ask for: its prompts times its n."""

    keep_alive_s: int = 75
    """Seconds an idle connection stays open; longer than clients keep theirs, so that they are the ones to close."""

    shutdown_grace_s: float = 30.0
    """Seconds that running requests are given to end before they are aborted."""

    access_log: bool = False
    """Log a line for every request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        for name in ("max_body_bytes", "max_choices", "keep_alive_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.shutdown_grace_s < 0:
            raise ConfigError(f"--grace-s must not be negative, got {self.shutdown_grace_s}")
