"""The health of a server: its answer to GET /health."""

from __future__ import annotations

import ssl

from kvferry.core.errors import ConfigError, TransferError
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin

_TIMEOUT_S = 5.0


async def serves(url: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """True if GET `url`/health is answered with 200 within `timeout_s`."""
    return await ask_health(url, timeout_s) == 200


async def ask_health(url: str, timeout_s: float = _TIMEOUT_S) -> int:
    """The status of the answer to GET `url`/health within `timeout_s`; 0: there was no answer. At an https:// URL, any
    certificate is accepted, because no secrets are sent."""
    try:
        origin = Origin.parse(url)
        async with HttpClient(ssl._create_unverified_context() if origin.tls else None) as client:
            status, _, _ = await client.ask(origin, "GET", "/health", timeout_s=timeout_s)
    except (TransferError, ConfigError):
        return 0
    return status
