"""How a fleet's controller asks a process of its own whether it serves, under TLS too."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.fleet.processes.health_check import serves
from support.certificates import Authority


@asynccontextmanager
async def healthy(cert: Path | None = None, key: Path | None = None, status: bytes = b"200 OK") -> AsyncIterator[str]:
    """The URL of a server that answers everything with `status`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    context = None
    if cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"{'http' if cert is None else 'https'}://127.0.0.1:{port}"


async def test_plain() -> None:
    async with healthy() as url:
        assert await serves(url)
        assert not await serves(url.replace("http:", "https:"))
    assert not await serves(url)
    async with healthy(status=b"503 Service Unavailable") as url:
        assert not await serves(url)


async def test_under_tls_any_certificate_will_do(tmp_path: Path) -> None:
    for cert, key in (Authority(tmp_path).issue(), Authority(tmp_path).expired()):
        async with healthy(cert, key) as url:
            assert await serves(url)
            assert not await serves(url.replace("https:", "http:"))
