"""Limits of a server's use by clients. A field's docstring is its flag's help."""

from __future__ import annotations

from kvferry.core.settings.bounds import Count, Seconds
from kvferry.core.settings.model import Settings


class HttpLimits(Settings, frozen=True, kw_only=True):
    """Limits of one server; all of them are on by default."""

    http_header_s: Seconds = 20.0
    """Seconds within which the header of a request must have arrived, from its first byte or from the start of the
    connection."""

    http_body_gap_s: Seconds = 20.0
    """Longest pause between two chunks of a request's body, in seconds."""

    http_body_s: Seconds = 300.0
    """Seconds within which the whole body of a request must have arrived."""

    http_stall_s: Seconds = 60.0
    """Seconds that a client may go without reading an answer that is ready for it; its connection is then cut."""

    http_idle_s: Seconds = 75.0
    """Seconds that an idle connection stays open. It should be longer than clients keep theirs, so that clients close
    first."""

    http_header_bytes: Count = 65536
    """Most bytes of a request's header, including its first line; more is answered with 431."""

    http_header_count: Count = 128
    """Most header lines of a request; more is answered with 431."""

    http_connections: Count = 10000
    """Most connections at the same time; further ones are answered with 503 and closed."""

    http_client_connections: Count = 2500
    """Most connections at the same time from one client address; further ones are answered with 503 and closed. A proxy
    counts as one client."""
