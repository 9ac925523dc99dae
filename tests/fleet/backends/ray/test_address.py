"""The address of a fleet's routers outlives each of their actors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.ray.address import SharedAddress, owners
from kvferry.http.server.listen import listen

ANY = [("127.0.0.1", 0)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/tmp") as path:  # a name of a socket must not be long
        yield Path(path)


def port_of(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        return int(one.getsockname()[1])


async def opened_elsewhere(one: SharedAddress) -> tuple[int, ...]:
    """While this event loop passes sockets on, as that of another process does."""
    return await asyncio.to_thread(lambda: asyncio.run(one.open(ANY)))


async def test_it_is_handed_from_one_to_the_next(folder: Path) -> None:
    first, second = SharedAddress(folder, "1-1"), SharedAddress(folder, "2-2")
    (bound,) = await first.open(ANY)
    (handed,) = await opened_elsewhere(second)
    port = port_of(bound)
    assert port_of(handed) == port
    assert sorted(owners(folder)) == ["1-1", "2-2"]
    first.close()
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert owners(folder) == ["2-2"]
    second.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


async def test_what_a_dead_one_has_left_is_passed_over(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(folder / "7-7.sock"))
    one = SharedAddress(folder, "8-8")
    (bound,) = await one.open(ANY)
    socket.create_connection(("127.0.0.1", port_of(bound)), timeout=10).close()
    one.close()


async def test_an_address_that_is_used(folder: Path) -> None:
    one = SharedAddress(folder, "1-1")
    with closing(listen("127.0.0.1", 0)) as others, pytest.raises(ConfigError, match="cannot listen on"):
        await one.open([others.getsockname()])
    one.close()
