"""The contract, of every store and of tiers."""

import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest
from servers import start_mooncake_master, start_server

from kvferry.core.errors import ConfigError
from kvferry.store.table import find_store
from kvferry.testing.stores import StoreContract
from support.valkey_cluster import ValkeyCluster
from support.valkey_server import BINARIES, server_binary


class TestMemory(StoreContract):
    url = "memory:8MiB"
    bounded_url = "memory:?num_blocks=16&name=bounded"


class TestFile(StoreContract):
    url = "file:{folder}/kv"
    bounded_url = "file:{folder}/bounded?max_bytes=200kB"


class TestSyncedFile(StoreContract):
    url = "file:{folder}/kv?fsync=true&max_bytes=8MiB&threads=1"


class WithServer(StoreContract):
    """`{server}` is the server's socket."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("server")
        socket, process = start_server(folder)
        written, bounded = cls.url, cls.bounded_url
        cls.url = tuple(
            url.replace("{server}", str(socket)) for url in ([written] if isinstance(written, str) else written)
        )
        cls.bounded_url = bounded.replace("{server}", str(socket)) if bounded is not None else None
        yield
        cls.url, cls.bounded_url = written, bounded
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)


class TestValkey(WithServer):
    url = "valkey:{server}"


@pytest.mark.parametrize("share", ["-0.1", "1.5", "half"])
def test_a_pinned_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match="pinned_share"):
        find_store(f"memory:1MiB?pinned_share={share}")


class TestBoundedValkey(WithServer):
    url = "valkey:{server}?max_bytes=8MiB&ttl_s=60"
    bounded_url = "valkey:{server}?max_bytes=200kB"


class TestValkeyCluster(StoreContract):
    """Three nodes."""

    url = "valkey://127.0.0.1:{port}?cluster=true&max_bytes=8MiB"
    bounded_url = "valkey://127.0.0.1:{port}?cluster=true&max_bytes=200kB"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _cluster(cls) -> Iterator[None]:
        if server_binary() is None:
            pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
        written, bounded = cls.url, cls.bounded_url
        with closing(ValkeyCluster()) as cluster:
            cls.url, cls.bounded_url = (url.replace("{port}", str(cluster.ports[1])) for url in (written, bounded))
            yield
            cls.url, cls.bounded_url = written, bounded


class TestMemoryOverFile(StoreContract):
    url = ("memory:8MiB?name=tiers", "file:{folder}/kv")


class TestMemoryOverFileOverValkey(WithServer):
    url = ("memory:8MiB?name=three", "file:{folder}/kv", "valkey:{server}")


@pytest.mark.full
class TestMooncake(StoreContract):
    outlives_instances = False
    url = "mooncake://{master}?segment_bytes=32MiB&buffer_bytes=16MiB"
    bounded_url = "mooncake://{master}?segment_bytes=32MiB&buffer_bytes=16MiB&pinned_share=0.005"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _master(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        address, process = start_mooncake_master(tmp_path_factory.mktemp("master"))
        written, bounded = cls.url, cls.bounded_url
        cls.url, cls.bounded_url = (url.replace("{master}", address) for url in (written, bounded))
        yield
        cls.url, cls.bounded_url = written, bounded
        end(process)


class TestThirdParty(StoreContract):
    url = "third_party_store:DictStore"


del WithServer, StoreContract
