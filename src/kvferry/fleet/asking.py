"""Asking a program over HTTP whether it serves."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

_TIMEOUT_S = 5.0


async def serves(url: str) -> bool:
    """Whether GET `url`/health is answered with 200, now.

    By hand, as a client library would be loaded for one line; whoever supervises starts fast and stays small.
    """
    address = urlsplit(url)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status[1:2] == [b"200"]
