"""How much of a server one client may use, and for how long. A field's docstring is its flag's help."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvferry.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Bounds of one server; all of them are on by default."""

    http_header_s: float = 20.0
    """Seconds within which the header of a request must have arrived, from its first byte or from the start of the
    connection."""

    http_body_gap_s: float = 20.0
    """Longest pause between two pieces of a request's body, in seconds."""

    http_body_s: float = 300.0
    """Seconds within which the whole body of a request must have arrived."""

    http_stall_s: float = 60.0
    """Seconds that a client may go without reading an answer that is ready for it; its connection is then cut."""

    http_idle_s: float = 75.0
    """Seconds that an idle connection stays open. It should be longer than clients keep theirs, so that clients close
    first."""

    http_header_bytes: int = 65536
    """Most bytes of a request's header, including its first line; more is answered with 431."""

    http_header_count: int = 128
    """Most header lines of a request; more is answered with 431."""

    http_connections: int = 10000
    """Most connections at the same time; further ones are answered with 503 and closed."""

    http_client_connections: int = 2500
    """Most connections at the same time from one client address; further ones are answered with 503 and closed. A proxy
    counts as one client."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not value > 0:
                raise ConfigError(f"--{one.name.replace('_', '-')} must be above 0, got {value}")
