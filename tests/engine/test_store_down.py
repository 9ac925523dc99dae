"""Hand-offs through a store that is killed, hangs, is full, slow, read-only or comes back empty: right and at once, and
through the store again soon after its recovery. `timeout_s` is far beyond what any of this may take."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.store.file import FileStore
from kvferry.store.files import NoteFiles
from support.engines import GREEDY, Answer, random_prompts, require_same, run_prompts
from support.flaky_link import FlakyLink
from support.pairs import Pair, pair_of
from support.ports import free_port
from support.valkey_server import BINARIES, ValkeyServer, server_binary

TIMEOUT_S = 300.0
AT_ONCE_S = 8.0
"""For a request beside a store that is down, on a machine that does other things as well."""
BACK_S = 60.0
NUM_DOWN = 3
BLOCK = {"block_size": 8}
SETTINGS = {"prefill": BLOCK, "decode": BLOCK}


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> tuple[Path, list[list[int]], list[Answer]]:
    """What one engine answers."""
    model = model_maker("llama")
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB"))
    prompts = [
        prompt
        for prompt in random_prompts(400, engine.model.vocab_size, longest=80, block_size=8, seed=4)
        if len(prompt) >= 40
    ]
    answers = run_prompts(engine, prompts, GREEDY)
    engine.close()
    return model, prompts, answers


class Place:
    """A store and what may befall it. `serves_in_trouble`: something still has the blocks."""

    connector = "KVStoreConnector"
    serves_in_trouble = False

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack

    @property
    def extra(self) -> dict[str, Any]:
        raise NotImplementedError

    def trouble(self) -> None:
        raise NotImplementedError

    def recover(self) -> None:
        raise NotImplementedError


class OnServer(Place):
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        if server_binary() is None:
            pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
        self.port = free_port()
        self.server = ValkeyServer("--port", str(self.port))
        stack.callback(self.server.close)

    @property
    def extra(self) -> dict[str, Any]:
        return {"store": self.server.url}


class Killed(OnServer):
    def trouble(self) -> None:
        self.server.kill()

    def recover(self) -> None:
        self.server.start()


class Hung(OnServer):
    def trouble(self) -> None:
        self.server.pause()

    def recover(self) -> None:
        self.server.resume()


class Full(OnServer):
    def trouble(self) -> None:
        assert self.server.say("CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK\r\n"
        assert self.server.say("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"

    def recover(self) -> None:
        assert self.server.say("CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"


class ReadOnly(OnServer):
    def trouble(self) -> None:
        assert self.server.say("REPLICAOF", "127.0.0.1", "1") == b"+OK\r\n"

    def recover(self) -> None:
        assert self.server.say("REPLICAOF", "NO", "ONE") == b"+OK\r\n"


class RestartedEmpty(OnServer):
    def trouble(self) -> None:
        self.server.kill()
        self.server.start()

    def recover(self) -> None:
        pass


class Slow(OnServer):
    """Each answer of the server's is on its way for a second."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.link = FlakyLink(self.port)
        stack.callback(self.link.close)

    @property
    def extra(self) -> dict[str, Any]:
        return {"store": f"valkey://127.0.0.1:{self.link.port}"}

    def trouble(self) -> None:
        self.link.delay_s = 1.0

    def recover(self) -> None:
        self.link.delay_s = 0.0


class Tiers:
    """Memory that P and D share, above a server."""

    serves_in_trouble = True
    server: ValkeyServer
    folder: Path

    @property
    def extra(self) -> dict[str, Any]:
        return {"store": [f"memory:8MiB?name={self.folder.name}", self.server.url]}


class TiersKilled(Tiers, Killed): ...  # type: ignore[misc]


class TiersHung(Tiers, Hung): ...  # type: ignore[misc]


class TiersFull(Tiers, Full): ...  # type: ignore[misc]


class BackKilled(TiersKilled):
    """What goes to the server is written there behind the request."""

    @property
    def extra(self) -> dict[str, Any]:
        return {**super().extra, "write": "back"}


class BackHung(TiersHung):
    @property
    def extra(self) -> dict[str, Any]:
        return {**super().extra, "write": "back"}


class LMCacheKilled(Killed):
    connector = "LMCacheConnector"

    @property
    def extra(self) -> dict[str, Any]:
        return {"lmcache.local_cpu": False, "lmcache.remote_url": f"redis://127.0.0.1:{self.port}"}


class LMCacheHung(Hung):
    connector, extra = LMCacheKilled.connector, LMCacheKilled.extra


class OnDisk(Place):
    connector = "SharedStorageConnector"

    @property
    def root(self) -> Path:
        return self.folder / "kv"

    @property
    def extra(self) -> dict[str, Any]:
        return {"shared_storage_path": str(self.root)}


class Gone(OnDisk):
    def trouble(self) -> None:
        self.root.rename(self.folder / "moved")
        self.root.write_text("something else")

    def recover(self) -> None:
        self.root.unlink()


class TooSmall(OnDisk):
    """No file of this process's may be as long as a block: as a full disk, that has room for notes."""

    def trouble(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, self.before[1]))
        self.stack.callback(self.recover)

    def recover(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


class OnSmallDisk(OnDisk):
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.root.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "none", self.root], check=False, capture_output=True
        )
        if mounted.returncode:
            pytest.skip("only root may mount a disk")
        stack.callback(subprocess.run, ["umount", "-l", self.root], check=True)


class DiskFull(OnSmallDisk):
    def trouble(self) -> None:
        filler = os.open(self.root / "filler", os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while True:
                os.write(filler, bytes(4096))
        os.close(filler)

    def recover(self) -> None:
        (self.root / "filler").unlink()


class DiskReadOnly(OnSmallDisk):
    def trouble(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.root], check=True)

    def recover(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", self.root], check=True)


class DiskHung(OnDisk):
    """No call into the directory returns, as into one of a server that is gone."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.answers = threading.Event()
        self.answers.set()
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        stack.callback(self.answers.set)
        for kind in (FileStore, NoteFiles):
            patch.setattr(kind, "_path", self._hanging(kind._path))

    def _hanging(self, path_of: Callable[..., Any]) -> Callable[..., Any]:
        def path(*arguments: Any) -> Any:
            assert self.answers.wait(TIMEOUT_S)
            return path_of(*arguments)

        return path

    def trouble(self) -> None:
        self.answers.clear()

    def recover(self) -> None:
        self.answers.set()


PLACES = [
    Killed, Hung, Full, ReadOnly, RestartedEmpty, Slow, TiersKilled, TiersHung, TiersFull,
    BackKilled, BackHung, LMCacheKilled, LMCacheHung, Gone, TooSmall, DiskFull, DiskReadOnly, DiskHung,
]  # fmt: skip


@contextmanager
def hand_offs(place: Place, alone: tuple[Path, list[list[int]], list[Answer]]) -> Iterator[Callable[[], bool]]:
    """Each call hands a prompt off that nobody had before; returns whether its KV came through the store."""
    model, prompts, answers = alone
    rest = iter(zip(prompts, answers, strict=True))
    extra = {**place.extra, "timeout_s": TIMEOUT_S}

    def hand_off(pair: Pair) -> bool:
        prompt, expected = next(rest)
        before = pair.decode.statistics().external.num_external_hits
        require_same([expected], pair.run([prompt], GREEDY, "sequential"))
        return pair.decode.statistics().external.num_external_hits > before

    with pair_of(model, place.connector, extra=extra, **SETTINGS) as pair:
        yield lambda: hand_off(pair)
        pair.settle()


@pytest.mark.parametrize("kind", PLACES)
def test_a_store_in_trouble(kind: type[Place], alone: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        place = kind(tmp_path, stack)
        with hand_offs(place, alone) as hand_off:
            assert hand_off()
            place.trouble()
            served = []
            for _ in range(NUM_DOWN):
                begun = time.monotonic()
                served.append(hand_off())
                assert time.monotonic() - begun < AT_ONCE_S
            if place.serves_in_trouble:
                assert served[1:] == [True] * (NUM_DOWN - 1)
            place.recover()
            end = time.monotonic() + BACK_S
            while not hand_off():
                assert time.monotonic() < end, "it is not used again"
