"""Whether a server answers GET /health."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

_TIMEOUT_S = 5.0


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def certificate_in(path: Path) -> bytes:
    """The certificate (DER) of a server that was given this PEM file; empty if the file has none."""
    try:
        found = _PEM.search(path.read_text(encoding="ascii", errors="replace"))
        return ssl.PEM_cert_to_DER_cert(found.group()) if found else b""
    except (OSError, ValueError):
        return b""


async def serves(url: str, timeout_s: float = _TIMEOUT_S, certificate: bytes | None = None) -> bool:
    """Whether GET `url`/health is answered with 200 within `timeout_s`.

    At an https:// URL, the server must have the key of exactly this `certificate`: whether its names and dates are
    valid is the clients' concern, and no reason to take the server for hung. Without `certificate`, any server is
    accepted, as no secrets are sent.

    Written by hand, because a client library would be imported for one request; the supervisor starts fast and stays
    small.
    """
    address = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            context = _to_be_compared() if address.scheme == "https" else None
            reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=context)
            try:
                if certificate is not None and context is not None and _shown(writer) != certificate:
                    return False
                writer.write(f"GET /health HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: the line is too long
        return False
    return status[1:2] == [b"200"]


def _shown(writer: asyncio.StreamWriter) -> bytes | None:
    found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return found


def _to_be_compared() -> ssl.SSLContext:
    """A context that accepts every certificate: the handshake proves that the server has the key of the one it
    shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
