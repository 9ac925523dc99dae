"""The sockets on which the routers of a fleet accept connections. The actors of all routers of one node hold them: the
first one binds them, and passes them on to those that come later.

So a connection that comes while one router dies waits for another one, as on one machine, and the address lasts for as
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
from kvferry.http.server.listen import BACKLOG, reserve

_SUFFIX = ".sock"
_ASK_S = 2.0
"""How long another actor may take to pass the sockets on."""
_LOCKED_S = 10.0
_LOOK_S = 0.02
_MOST = 8


class SharedAddress:
    """Owns this process's descriptors of the sockets, and a socket at which others ask for them, in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: of this process."""
        self._folder, self._name = folder, name
        self._listeners: list[socket.socket] = []
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def open(self, addresses: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """Descriptors of the sockets, for as long as this is open. Raises `ConfigError` if an address cannot be used,
        or `OSError`."""
        deadline = SYSTEM_CLOCK.monotonic() + _LOCKED_S
        with (self._folder / "lock").open("w") as lock:
            while not _locked(lock.fileno()):
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise ConfigError(f"another router still holds the lock of {self._folder}")
                await asyncio.sleep(_LOOK_S)
            self._listeners = self._from_others(len(addresses))
            if not self._listeners:
                for host, port in addresses:
                    self._listeners.append(reserve(host, port))
                    self._listeners[-1].listen(BACKLOG)
            self._asked.bind(str(self._folder / f"{self._name}{_SUFFIX}"))
            self._asked.listen()
            self._asked.setblocking(False)
            asyncio.get_running_loop().add_reader(self._asked, self._pass_on)
        return tuple(one.fileno() for one in self._listeners)

    def close(self) -> None:
        """Close the sockets, which others may still have open."""
        with suppress(ValueError):  # it was never opened
            asyncio.get_running_loop().remove_reader(self._asked)
        for one in (self._asked, *self._listeners):
            one.close()
        (self._folder / f"{self._name}{_SUFFIX}").unlink(missing_ok=True)

    def _from_others(self, number: int) -> list[socket.socket]:
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError), _connected(path) as other:
                _, descriptors, _, _ = socket.recv_fds(other, 1, _MOST, socket.MSG_CMSG_CLOEXEC)
                found = [socket.socket(fileno=one) for one in descriptors]
                if len(found) == number:
                    return found
                for one in found:
                    one.close()
        return []

    def _pass_on(self) -> None:
        with suppress(OSError):
            asking, _ = self._asked.accept()
            with asking:
                socket.send_fds(asking, [b"."], [one.fileno() for one in self._listeners])


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
        return [one.stem for one in folder.iterdir() if one.suffix == _SUFFIX]
    return []
