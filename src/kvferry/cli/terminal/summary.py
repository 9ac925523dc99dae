"""The facts that a serving command shows once: at its start, and when it answers requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvferry.cli.router_address import WILDCARDS, reachable_url
from kvferry.cli.text import shortened
from kvferry.fleet.spec.settings import ListenSettings
from kvferry.http.server.config import HttpAccess


@dataclass(frozen=True, kw_only=True)
class ServeSummary:
    """The facts. `command`: name of the command; `title`: the line at its start; empty: none."""

    command: str
    title: str = ""
    port: int = 0
    models: tuple[str, ...] = ()
    has_page: bool = True
    """False with --no-page, if the page is on the admin port, and for an instance behind a router."""
    page_views: str = "fleet, requests, chat"
    has_keys: bool = False
    """True if clients need a key."""
    admin_key: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    answers_clients: bool = True
    """False for an instance behind a router."""
    has_block: bool = True
    """False for a command that prints its own results on the terminal: neither the block nor the live line is shown."""
    end: str = "Ctrl-C ends everything."
    """The effect of Ctrl-C."""


def summary_of(command: str, listen: ListenSettings, access: HttpAccess, **more: Any) -> ServeSummary:
    """The summary of a command with these settings; `more`: its other fields."""
    keys = (*access.admin_keys(), *access.api_keys())
    return ServeSummary(
        command=command,
        port=listen.port,
        has_keys=bool(access.api_keys()) or access.tls_verify_clients,
        admin_key=keys[0] if keys else None,
        tls_ca=access.tls_ca,
        **{"has_page": False, **more},
    )


def ready_lines(url: str, summary: ServeSummary, log: Path | None) -> Iterator[str]:
    """The block with the addresses of the API, the page and the log."""
    local = reachable_url(url)
    if summary.has_page:
        yield f"  page    {local}   ({summary.page_views})"
    if summary.answers_clients:
        models = ", ".join(summary.models)
        yield f"  OpenAI  {local}/v1" + (f"   model: {models}" if models else "")
    if summary.has_page:
        yield f"  watch   kvferry top {local}"
    if log is not None:
        yield f"  log     {shortened(log)}"
    if urlsplit(url).hostname in WILDCARDS:
        yield from _exposure(url, has_keys=summary.has_keys)
    yield summary.end


def _exposure(url: str, *, has_keys: bool) -> Iterator[str]:
    """The address for other machines, and who can use it."""
    parts = urlsplit(url)
    address = _own_address()
    elsewhere = f"{parts.scheme}://{address}:{parts.port}" if address else f"port {parts.port} of this machine"
    yield f"  network {elsewhere}"
    if not has_keys:
        yield "  Anyone who reaches this machine can use the model: --api-key KEY locks it,"
        yield "  --host 127.0.0.1 keeps it to this machine."


def _own_address() -> str:
    """The address of the interface that leads to other networks; empty if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
