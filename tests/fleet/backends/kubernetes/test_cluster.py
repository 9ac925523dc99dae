"""Within a pod, the API server is reached over TLS with the token of the pod's service account."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")


from fleet.backends.kubernetes.emulated import Cluster as Emulated
from fleet.backends.kubernetes.emulated import lease
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.cluster import Cluster, ClusterError
from support.certificates import Authority

ACCOUNT = "kubernetes.aio.config.incluster_config"
CHANGES = {"spec": {"holderIdentity": "x"}}


@asynccontextmanager
async def over_tls(url: str, authority: Authority) -> AsyncIterator[int]:
    """The port at which what answers at a URL is reached over TLS."""
    there = urlsplit(url)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue())
    passing: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(there.hostname, there.port)
        passing.update(
            (asyncio.create_task(copy(reader, other_writer)), asyncio.create_task(copy(other_reader, writer)))
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


async def test_the_account_of_a_pod_is_used_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, stranger = Authority(tmp_path / "one"), Authority(tmp_path / "other")
    token = tmp_path / "token"
    monkeypatch.setattr(f"{ACCOUNT}.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(f"{ACCOUNT}.SERVICE_CERT_FILENAME", str(authority.ca))
    async with (
        asyncio.timeout(100),
        Emulated().running(tmp_path) as emulated,
        over_tls(emulated.url, authority) as port,
        over_tls(emulated.url, stranger) as elsewhere,
    ):
        monkeypatch.delenv("KUBECONFIG")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        with pytest.raises(ConfigError, match="there is no way to a cluster: Service token file does not exist"):
            await Cluster.connect("llm", None)
        await emulated.create(lease())
        token.write_text("of the account")
        cluster = await Cluster.connect("llm", None)
        await cluster.patch("coordination.k8s.io/v1", "Lease", "chat-controller", CHANGES)
        await cluster.close()
        assert emulated.server.tokens == ["bearer of the account"]
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(elsewhere))
        cluster = await Cluster.connect("llm", None)
        with pytest.raises(ClusterError, match=r"does not answer: .*CERTIFICATE_VERIFY_FAILED"):
            await cluster.patch("coordination.k8s.io/v1", "Lease", "chat-controller", CHANGES)
        await cluster.close()
        assert len(emulated.server.tokens) == 1
