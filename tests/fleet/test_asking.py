"""How the supervisor asks a process of its own whether it serves, under TLS too."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.fleet.asking import certificate_in, serves
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


async def test_under_tls_exactly_the_given_certificate_is_believed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue()
    other, _ = authority.issue("other")
    async with healthy(cert, key) as url:
        assert await serves(url, certificate=certificate_in(cert))
        assert not await serves(url, certificate=certificate_in(other)), "of the same authority, and not the one"
        assert await serves(url), "a program of others may show any"
        assert not await serves(url.replace("https:", "http:"), certificate=certificate_in(cert))


async def test_a_certificate_that_clients_refuse_is_no_hung_server(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).expired()
    async with healthy(cert, key) as url:
        assert await serves(url, certificate=certificate_in(cert))


def test_a_file_with_a_chain_or_without_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue()
    alone = certificate_in(cert)
    chain = tmp_path / "chain.pem"
    chain.write_text(key.read_text() + cert.read_text() + authority.ca.read_text())
    assert certificate_in(chain) == alone != b""
    for content in (b"", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----"):
        chain.write_bytes(content)
        assert certificate_in(chain) == b""
    assert certificate_in(tmp_path / "nowhere") == b""
