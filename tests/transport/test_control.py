"""A listener: purposes, strangers, ports, and those who say nothing."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest
from control_support import HERE, echo_listener, raw, until_rejected
from kv_support import soon

from kvferry.core.errors import (
    ConfigError,
    PeerLost,
    ProtocolError,
)
from kvferry.core.messages.wire import encode_frame
from kvferry.transport.connection import (
    PROTOCOL_VERSION,
    Connection,
    Hello,
    Refused,
)
from kvferry.transport.control import Listener, dial
from support.waiting import eventually


async def test_an_unknown_purpose_is_refused() -> None:
    async with echo_listener() as listener:
        with pytest.raises(ProtocolError, match="no service 'other'"):
            await dial(listener.host, listener.port, "other", HERE, "secret", soon())


HOSTILE = {
    "no length": bytes(4),
    "endless": b"\xff\xff\xff\xff",
    "longer than a greeting may be": (2**20).to_bytes(4, "big") + bytes(100),
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "truncated": bytes(encode_frame(Hello(PROTOCOL_VERSION, "echo", bytes(32))))[:-3],
    "broken inside": (5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1",
    "unknown tag": bytes(encode_frame(Refused("kind", "reason"))),
    "short nonce": bytes(encode_frame(Hello(PROTOCOL_VERSION, "echo", b"n"))),
    "a pickle": (5).to_bytes(4, "big") + b"\x80\x04K\x01.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bytes_end_their_own_connection_only(name: str) -> None:
    async with echo_listener() as listener:
        connection = await raw(listener)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection.socket, HOSTILE[name])
        connection.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost):
            await refusals(connection)
        await connection.close()


async def test_who_says_nothing_is_not_waited_for() -> None:
    async with echo_listener(handshake_s=0.05) as listener:
        connection = await raw(listener)
        with pytest.raises(PeerLost):
            await connection.receive(Refused)
        await until_rejected(listener, "TransferTimeout")
        await connection.close()


def test_strangers_are_kept_out() -> None:
    with pytest.raises(ConfigError, match="KVFERRY_AUTH_TOKEN"):
        Listener(HERE, "", "0.0.0.0")
    listener = Listener(HERE, "secret", "0.0.0.0")
    assert listener.host != "0.0.0.0", "peers need an address that leads here"
    listener.close()


@pytest.mark.parametrize("host", ["a..b", "nowhere.invalid", "x" * 300])
def test_a_host_that_cannot_be_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on kv_ip"):
        Listener(HERE, "secret", host)


def test_a_port_in_use_is_a_config_error() -> None:
    listener = Listener(HERE, "")
    with pytest.raises(ConfigError, match=f"kv_port {listener.port}"):
        Listener(HERE, "", port=listener.port)
    listener.close()


async def refusals(connection: Connection) -> None:
    """Read until the listener ends the connection."""
    async with asyncio.timeout(10):
        while True:
            await connection.receive(Refused)


async def is_refused(mute: socket.socket) -> bool:
    """Whether it was closed at once; what is not is told nothing until the handshake is too late."""
    mute.setblocking(False)
    return await asyncio.get_running_loop().sock_recv(mute, 1) == b""


async def test_who_does_not_say_who_they_are_keep_no_peer_out() -> None:
    async with (
        echo_listener(handshake_s=3600, max_unauthenticated_per_address=2) as listener,
        AsyncExitStack() as stack,
    ):
        mutes = [
            stack.enter_context(
                socket.create_connection((listener.host, listener.port), source_address=("127.0.0.2", 0))
            )
            for _ in range(3)
        ]
        assert await is_refused(mutes.pop())
        assert listener.statistics()["refused_connections"] == 1
        peers = [await dial(listener.host, listener.port, "echo", HERE, "secret", soon()) for _ in range(4)]
        assert listener.statistics()["open_connections"] == 6, "who was admitted is no stranger"
        for peer in peers:
            await peer.close()
        for mute in mutes:
            mute.close()
        await eventually(lambda: listener.statistics()["open_connections"] == 0)
        assert not listener._unauthenticated


async def test_strangers_are_bounded_wherever_they_come_from() -> None:
    async with echo_listener(handshake_s=3600, max_unauthenticated=2) as listener, AsyncExitStack() as stack:
        addresses = [("127.0.0.2", 0), ("127.0.0.3", 0), ("127.0.0.4", 0)]
        mutes = [
            stack.enter_context(socket.create_connection((listener.host, listener.port), source_address=address))
            for address in addresses
        ]
        assert await is_refused(mutes[-1])
        mutes[0].close()
        await eventually(lambda: listener.statistics()["open_connections"] == 1)
