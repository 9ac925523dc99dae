"""How a server answers GET /health."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

_TIMEOUT_S = 5.0


async def serves(url: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether GET `url`/health is answered with 200 within `timeout_s`."""
    return await ask_health(url, timeout_s) == 200


async def ask_health(url: str, timeout_s: float = _TIMEOUT_S) -> int:
    """The status with which GET `url`/health is answered within `timeout_s`; 0 if it is not. At an https:// URL, any
    certificate is accepted, as no secrets are sent.

    Written by hand, because a client library would be imported for one request.
    """
    address = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            context = ssl._create_unverified_context() if address.scheme == "https" else None
            reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=context)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: the line is too long
        return 0
    return int(status[1]) if len(status) > 1 and status[1].isdigit() else 0
