"""Stores between instances, and what befalls them. Servers and disks are real; where a disk is slow or hangs, the test
holds up calls in its own process."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.store.access import FileAccess
from kvferry.store.disk import DISK, Disk
from kvferry.store.machine import MACHINE
from support.flaky_link import FlakyLink
from support.ports import free_port
from support.valkey_server import BINARIES, ValkeyServer, server_binary

SLOW_S, HUNG_S, REMOUNT_S = 1.0, 3600.0, 20.0
ON_SERVER = ("valkey", "tiers", "tiers, written back", "lmcache")
SERVER_STATES = ("killed", "hung", "full", "slow", "read-only", "restarted empty")
DISK_STATES = ("gone", "hung", "full", "full for long files", "slow", "read-only", "emptied")
MOUNTED = ("full", "read-only")
"""Of a disk that was mounted for the test, which only root may do."""


class OnServer:
    """A Valkey server, as `store` uses it; `extra` are the connector's settings. With a `link`, it is reached over
    that, and can be slow."""

    def __init__(self, store: str, folder: Path, stack: ExitStack, *, link: bool) -> None:
        if server_binary() is None:
            pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
        port = free_port()
        self.server = ValkeyServer("--port", str(port))
        stack.callback(self.server.close)
        self.link = FlakyLink(port) if link else None
        if self.link is not None:
            stack.callback(self.link.close)
            port = self.link.port
        tiers = [f"memory:8MiB?name={folder.name}", f"valkey://127.0.0.1:{port}"]
        self.connector = "LMCacheConnector" if store == "lmcache" else "KVStoreConnector"
        self.extra: dict[str, Any] = {
            "valkey": {"store": tiers[1]},
            "tiers": {"store": tiers},
            "tiers, written back": {"store": tiers, "write": "back"},
            "lmcache": {"lmcache.local_cpu": False, "lmcache.remote_url": f"redis://127.0.0.1:{port}"},
        }[store]
        self.serves_in_trouble = store.startswith("tiers")
        """Something still has the blocks."""

    def trouble(self, state: str) -> None:
        match state:
            case "killed":
                self.server.kill()
            case "hung":
                self.server.pause()
            case "full":
                self._set("CONFIG", "SET", "maxmemory-policy", "noeviction")
                self._set("CONFIG", "SET", "maxmemory", "1")
            case "slow":
                assert self.link is not None
                self.link.delay_s = SLOW_S
            case "read-only":
                self._set("REPLICAOF", "127.0.0.1", "1")
            case "restarted empty":
                self.server.kill()
                self.server.start()

    def recover(self, state: str) -> None:
        match state:
            case "killed":
                self.server.start()
            case "hung":
                self.server.resume()
            case "full":
                self._set("CONFIG", "SET", "maxmemory", "0")
            case "slow":
                assert self.link is not None
                self.link.delay_s = 0.0
            case "read-only":
                self._set("REPLICAOF", "NO", "ONE")

    def _set(self, *words: str) -> None:
        assert self.server.say(*words) == b"+OK\r\n"


class OnDisk:
    """A directory; with `mount`, a small disk of its own. `hold_up(seconds)`: from now on, calls into it take so long,
    wherever they are made."""

    serves_in_trouble = False
    connector = "SharedStorageConnector"

    def __init__(self, folder: Path, stack: ExitStack, hold_up: Callable[[float], object], *, mount: bool) -> None:
        self.folder, self.root, self._stack, self._hold_up = folder, folder / "kv", stack, hold_up
        self.extra: dict[str, Any] = {"shared_storage_path": str(self.root)}
        if mount:
            self.root.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", self.root]
            if subprocess.run(command, check=False, capture_output=True).returncode:
                pytest.skip("only root may mount a disk")
            stack.callback(subprocess.run, ["umount", "-l", self.root], check=True)

    def trouble(self, state: str) -> None:
        match state:
            case "gone":
                self.root.rename(self.folder / "moved")
                self.root.write_text("something else")
            case "hung":
                self._hold_up(HUNG_S)
            case "slow":
                self._hold_up(SLOW_S)
            case "full":
                filler = os.open(self.root / "filler", os.O_WRONLY | os.O_CREAT)
                with suppress(OSError):
                    while True:
                        os.write(filler, bytes(4096))
                os.close(filler)
            case "full for long files":  # no file of this process may be as long as a block; notes may be written
                self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, self._before[1]))
                self._stack.callback(self.recover, state)
            case "read-only":
                self._remount("ro")
            case "emptied":
                self.root.rename(self.folder / "moved")  # at once, as somebody may be writing

    def recover(self, state: str) -> None:
        match state:
            case "gone":
                self.root.unlink()
            case "hung" | "slow":
                self._hold_up(0.0)
            case "full":
                (self.root / "filler").unlink()
            case "full for long files":
                resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
            case "read-only":
                self._remount("rw")

    def _remount(self, how: str) -> None:
        """Not while somebody writes."""
        deadline = time.monotonic() + REMOUNT_S
        while subprocess.run(["mount", "-o", f"remount,{how}", self.root], check=False).returncode:
            assert time.monotonic() < deadline


class HeldUpDisk(Disk):
    """A disk whose calls can be held up."""

    def __init__(self) -> None:
        self._seconds, self._changed = 0.0, threading.Event()

    def install(self) -> None:
        """Become the disk of the stores that this process makes from now on, until `undo`."""
        MACHINE.disk = self

    def set(self, seconds: float) -> None:
        """Calls take so long from now on; those under way return."""
        self._seconds, changed, self._changed = seconds, self._changed, threading.Event()
        changed.set()

    def undo(self) -> None:
        """Hold up nothing any more."""
        self.set(0.0)
        MACHINE.disk = DISK

    def _wait(self) -> None:
        if seconds := self._seconds:
            self._changed.wait(seconds)

    def make_folder(self, path: Path, access: FileAccess) -> None:
        self._wait()
        super().make_folder(path, access)

    def open(self, path: str) -> AbstractContextManager[int]:
        self._wait()
        return super().open(path)

    def touch(self, path: str) -> bool:
        self._wait()
        return super().touch(path)

    def is_readable(self, path: str) -> bool:
        self._wait()
        return super().is_readable(path)

    def remove(self, path: str) -> bool:
        self._wait()
        return super().remove(path)
