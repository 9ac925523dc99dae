"""Listeners and what is sent to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kv_support import make_layout, soon

from kvferry.transport.connection import (
    PROTOCOL_VERSION,
    Connection,
    Hello,
    Identity,
)
from kvferry.transport.control import Listener, dial
from support.waiting import eventually

HERE = Identity("here", make_layout())


THERE = Identity("there", make_layout())


@asynccontextmanager
async def echo_listener(token: str = "secret", **options: Any) -> AsyncIterator[Listener]:
    async def echo(connection: Connection) -> None:
        while True:
            await connection.send(await connection.receive(Hello))

    listener = Listener(THERE, token, **options)
    listener.handle("echo", echo)
    serving = asyncio.create_task(listener.serve())
    try:
        yield listener
        await require_alive(listener, token)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def require_alive(listener: Listener, token: str = "secret") -> None:
    connection = await dial(listener.host, listener.port, "echo", HERE, token, soon())
    await connection.send(Hello(PROTOCOL_VERSION, "ping", b""))
    assert await connection.receive(Hello) == Hello(PROTOCOL_VERSION, "ping", b"")
    await connection.close()


async def until_rejected(listener: Listener, kind: str) -> None:
    await eventually(lambda: f"rejected_{kind}" in listener.statistics())


async def raw(listener: Listener) -> Connection:
    sock = socket.create_connection((listener.host, listener.port))
    return Connection(sock)
