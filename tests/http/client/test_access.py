"""Keys, the admin listener, TLS."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.client.access import InstanceAccess
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.errors import Unreachable
from kvferry.http.server.config import HttpAccess, HttpConfig
from kvferry.http.tls import client_context
from support.waiting import eventually

from ..running import limits, opened, request, running, wire


async def status_of(port: int, path: str, key: str | None = None) -> int:
    headers = [] if key is None else [f"Authorization: Bearer {key}"]
    async with wire(port) as client:
        client.send(request(path, "GET", *headers))
        return (await client.reply()).status


async def test_without_keys_all_is_open() -> None:
    async with running() as served:
        for path in ("/ok", "/metrics", "/health"):
            assert await status_of(served.port, path) == 200


async def test_an_api_key_guards_all_but_health() -> None:
    async with running(api_key=("one", "two")) as served:
        for path in ("/ok", "/metrics"):
            assert await status_of(served.port, path) == 401
            assert await status_of(served.port, path, "three") == 401
            assert await status_of(served.port, path, "") == 401
            for key in ("one", "two"):
                assert await status_of(served.port, path, key) == 200
        assert await status_of(served.port, "/health") == 200


async def test_what_a_client_without_a_key_is_told() -> None:
    async with running(api_key=("one",)) as served, wire(served.port) as client:
        client.send(request("/ok", "GET", "Authorization: Basic b25lOm9uZQ=="))
        reply = await client.reply()
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
        client.send(request("/ok", "GET", "authorization: bearer one"))
        assert (await client.reply()).status == 200


async def test_an_admin_key_keeps_clients_out() -> None:
    async with running(api_key=("client",), admin_key=("admin",)) as served:
        assert await status_of(served.port, "/metrics", "client") == 401
        assert await status_of(served.port, "/metrics", "admin") == 200
        assert await status_of(served.port, "/ok", "admin") == 200


async def test_an_admin_listener_has_the_admin_paths_alone() -> None:
    async with running(admin_port=0) as served:
        public, admin = served.server.ports
        assert [await status_of(public, path) for path in ("/ok", "/metrics", "/health")] == [200, 404, 200]
        assert [await status_of(admin, path) for path in ("/ok", "/metrics", "/health")] == [404, 200, 200]


@pytest.mark.parametrize(
    "settings",
    [{"api_key": ("",)}, {"api_key": ("a b",)}, {"admin_key": ("ä",)}, {"tls_key": Path("x")}, {"admin_port": 70000}],
)
def test_settings_that_cannot_be(settings: Any) -> None:
    with pytest.raises(ConfigError, match="--"):
        HttpConfig(**settings)


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\ntwo\n")
    assert HttpConfig(api_key=("zero",), api_key_file=path).api_keys() == ("zero", "one", "two")
    path.write_text("\n")
    for bad in (path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="--api-key-file"):
            HttpConfig(api_key_file=bad).api_keys()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and one certificate of it for server and client."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    openssl("req", *curve, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "cert.pem", "-days", "2", "-extfile", "names"),
    )
    return folder


async def test_tls(certificates: Path) -> None:
    settings = {"tls_cert": certificates / "cert.pem", "tls_key": certificates / "key.pem"}
    async with running(**settings) as served:
        origin = Origin("127.0.0.1", served.port, tls=True)
        async with HttpClient(client_context(certificates / "ca.pem"), idle_s=60) as client:
            body = bytes(300_000)
            for _ in range(2):
                answer = await opened(client, origin, "POST", "/echo", [], body)
                assert await answer.read(2**20) == body
            assert client.statistics() == {str(origin): 1}
        async with HttpClient(tls=client_context(None)) as stranger:
            with pytest.raises(Unreachable, match="certificate"):
                await opened(stranger, origin, "GET", "/ok")


async def test_handshakes_that_are_not_finished_are_counted_and_end(certificates: Path) -> None:
    settings = {"tls_cert": certificates / "cert.pem", "tls_key": certificates / "key.pem"}
    bounds = limits(http_client_connections=3, http_header_s=1.0)
    async with running(limits=bounds, **settings) as served, AsyncExitStack() as stack:
        for first in (b"", bytes.fromhex("16030100f8"), bytes(100)):
            client = await stack.enter_async_context(wire(served.port))
            client.send(first)
        async with wire(served.port) as one_too_many:
            assert await one_too_many.to_end() == b""
        await eventually(lambda: not served.server.statistics()["connections"], interval_s=0)
        origin = Origin("127.0.0.1", served.port, tls=True)
        async with HttpClient(client_context(certificates / "ca.pem"), idle_s=60) as client:
            assert (await client.ask(origin, "GET", "/ok", timeout_s=20))[0] == 200


async def test_clients_with_a_certificate_only(certificates: Path) -> None:
    cert, key, ca = (certificates / name for name in ("cert.pem", "key.pem", "ca.pem"))
    (joined := certificates / "joined.pem").write_text(cert.read_text() + key.read_text())
    async with running(tls_cert=cert, tls_key=key, tls_ca=ca, tls_verify_clients=True) as served:
        origin = Origin("localhost", served.port, tls=True)
        async with HttpClient(tls=client_context(ca, joined)) as known:
            assert (await known.ask(origin, "GET", "/ok", timeout_s=5))[0] == 200
        async with HttpClient(tls=client_context(ca)) as unknown:
            assert (await unknown.ask(origin, "GET", "/ok", timeout_s=5))[0] == 401
            assert (await unknown.ask(origin, "GET", "/health", timeout_s=5))[0] == 200


async def test_plain_http_to_a_tls_port_and_tls_to_a_plain_one(certificates: Path) -> None:
    settings = {"tls_cert": certificates / "cert.pem", "tls_key": certificates / "key.pem"}
    async with running(**settings) as served, wire(served.port) as client:
        client.send(request("/ok"))
        assert not (await client.to_end()).startswith(b"HTTP/")
    async with running() as served:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", served.port, ssl=client_context(None))
        async with wire(served.port) as client:
            client.send(request("/ok"))
            assert (await client.reply()).status == 200


@pytest.mark.parametrize("name", ["absent.pem", "names", "ca.key"])
async def test_certificates_that_cannot_be_used(certificates: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--tls-cert"):
        HttpConfig(tls_cert=certificates / name).tls_context()


def test_contexts_without_files_are_one() -> None:
    assert client_context(None) is client_context(None)


def test_keys_of_operators_and_instances_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n\nsecond\n")
    assert HttpAccess(admin_key=("flag",), admin_key_file=path).admin_keys() == ("flag", "first", "second")
    with pytest.raises(ConfigError, match="more than one key"):
        InstanceAccess(instance_api_key_file=path).api_key()
    path.write_text("first\n")
    assert InstanceAccess(instance_api_key_file=path).api_key() == "first"
    with pytest.raises(ConfigError, match="give one of them"):
        InstanceAccess(instance_api_key="k", instance_api_key_file=path)
    with pytest.raises(ConfigError, match="--admin-key-file"):
        HttpAccess(admin_key_file=tmp_path / "nowhere").admin_keys()
