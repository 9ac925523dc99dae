"""Asking a program over HTTP whether it serves."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

_TIMEOUT_S = 5.0


async def serves(url: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether GET `url`/health is answered with 200, now. Over TLS any certificate will do: nothing is told.

    By hand, as a client library would be loaded for one line; whoever supervises starts fast and stays small.
    """
    address = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            context = _any_certificate() if address.scheme == "https" else None
            reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=context)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: a line without end
        return False
    return status[1:2] == [b"200"]


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
