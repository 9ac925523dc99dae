"""The contract, of every store and of tiers."""

import subprocess
from collections.abc import Iterator

import pytest
from servers import start_mooncake_master, start_server

from kvferry.testing.stores import StoreContract


class TestMemory(StoreContract):
    url = "memory:8MiB"


class TestFile(StoreContract):
    url = "file:{folder}/kv"


class TestSyncedFile(StoreContract):
    url = "file:{folder}/kv?fsync=true&max_bytes=8MiB&threads=1"


class WithServer(StoreContract):
    """`{server}` is the server's socket."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("server")
        socket, process = start_server(folder)
        written = cls.url
        cls.url = tuple(
            url.replace("{server}", str(socket)) for url in ([written] if isinstance(written, str) else written)
        )
        yield
        cls.url = written
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)


class TestValkey(WithServer):
    url = "valkey:{server}"


class TestBoundedValkey(WithServer):
    url = "valkey:{server}?max_bytes=8MiB&ttl_s=60"


class TestMemoryOverFile(StoreContract):
    url = ("memory:8MiB?name=tiers", "file:{folder}/kv")


class TestMemoryOverFileOverValkey(WithServer):
    url = ("memory:8MiB?name=three", "file:{folder}/kv", "valkey:{server}")


@pytest.mark.full
class TestMooncake(StoreContract):
    outlives_instances = False
    url = "mooncake://{master}?segment_bytes=32MiB&buffer_bytes=16MiB"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _master(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        address, process = start_mooncake_master(tmp_path_factory.mktemp("master"))
        written = cls.url
        cls.url = written.replace("{master}", address)
        yield
        cls.url = written
        end(process)


class TestThirdParty(StoreContract):
    url = "third_party_store:DictStore"


del WithServer, StoreContract
