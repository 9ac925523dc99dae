"""The sockets on which the routers of a fleet accept connections. The actors of all routers of one node hold them: the
first actor binds them, and sends them to later ones.

So a connection that arrives while one router dies waits for another router, as on one machine. The address exists as
long as one of these actors does.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.http.server.listen import reserve, start_listening

_SUFFIX = ".sock"
_ASK_S = 2.0
"""Maximum seconds in which another actor sends the sockets."""


class SharedAddress:
    """Owns this process's descriptors of the sockets, and a socket in `folder` at which other actors get them."""

    max_sockets = 8
    poll_interval_s = 0.02
    locked_s = 10.0

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: of this process."""
        self._folder, self._name = folder, name
        self._listeners: list[socket.socket] = []
        self._sharing_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def open(self, addresses: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """Descriptors of the sockets, for as long as this is open. Raises `ConfigError` if an address cannot be used,
        or `OSError`."""
        deadline = SYSTEM_CLOCK.monotonic() + self.locked_s
        with (self._folder / "lock").open("w") as lock:
            while not _locked(lock.fileno()):
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise ConfigError(f"another router still holds the lock of {self._folder}")
                await asyncio.sleep(self.poll_interval_s)
            self._listeners = self._receive_sockets(len(addresses))
            if not self._listeners:
                for host, port in addresses:
                    self._listeners.append(reserve(host, port))
                    start_listening(self._listeners[-1])
            self._sharing_socket.bind(str(self._folder / f"{self._name}{_SUFFIX}"))
            self._sharing_socket.listen()
            self._sharing_socket.setblocking(False)
            asyncio.get_running_loop().add_reader(self._sharing_socket, self._send_sockets)
        return tuple(listener.fileno() for listener in self._listeners)

    def close(self) -> None:
        """Close the sockets, which others may still have open."""
        with suppress(ValueError):  # it was never opened
            asyncio.get_running_loop().remove_reader(self._sharing_socket)
        for sock in (self._sharing_socket, *self._listeners):
            sock.close()
        (self._folder / f"{self._name}{_SUFFIX}").unlink(missing_ok=True)

    def _receive_sockets(self, number: int) -> list[socket.socket]:
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError), _connected(path) as other:
                _, descriptors, _, _ = socket.recv_fds(other, 1, self.max_sockets, socket.MSG_CMSG_CLOEXEC)
                listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                if len(listeners) == number:
                    return listeners
                for listener in listeners:
                    listener.close()
        return []

    def _send_sockets(self) -> None:
        with suppress(OSError):
            asking, _ = self._sharing_socket.accept()
            with asking:
                socket.send_fds(asking, [b"."], [listener.fileno() for listener in self._listeners])


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.settimeout(_ASK_S)
        other.connect(str(path))
        yield other


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owners(folder: Path) -> list[str]:
    """The names of the processes that hold, or held, the sockets of this folder."""
    with suppress(OSError):
        return [path.stem for path in folder.iterdir() if path.suffix == _SUFFIX]
    return []
