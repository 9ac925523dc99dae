"""The handshake of two members, and frames after it: tokens, layouts, versions, hostile bytes."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from control_support import HERE, THERE, echo_listener, raw, until_rejected
from kv_support import make_layout, soon

from kvferry.core.errors import (
    AuthenticationFailed,
    LayoutMismatch,
    PeerLost,
    TransferTimeout,
)
from kvferry.core.messages.wire import encode_frame
from kvferry.transport.connection import (
    PROTOCOL_VERSION,
    Connection,
    Hello,
    Identity,
    Proof,
    Refused,
    translated_errors,
)
from kvferry.transport.control import dial


@pytest.mark.parametrize("token", ["secret", ""])
async def test_two_who_share_a_token_know_each_other(token: str) -> None:
    async with echo_listener(token) as listener:
        connection = await dial(listener.host, listener.port, "echo", HERE, token, soon())
        assert connection.peer == THERE
        await connection.close()


@pytest.mark.parametrize("token", ["", "Secret", "secret "])
async def test_a_wrong_token_is_refused_on_both_sides(token: str) -> None:
    async with echo_listener() as listener:
        with pytest.raises(AuthenticationFailed, match="KVFERRY_AUTH_TOKEN"):
            await dial(listener.host, listener.port, "echo", HERE, token, soon())
        await until_rejected(listener, "AuthenticationFailed")


async def test_a_listener_that_does_not_know_the_token_is_not_believed() -> None:
    async def impostor(sock: socket.socket) -> None:
        connection = Connection(sock)
        await connection.receive(Hello)
        await connection.send(Hello(PROTOCOL_VERSION, "", bytes(32)))
        proof = await connection.receive(Proof)
        await connection.send(Proof(THERE, proof.code))
        await connection.close()

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    dialling = asyncio.create_task(dial(*listening.getsockname()[:2], "echo", HERE, "secret", soon()))
    sock, _ = await asyncio.get_running_loop().sock_accept(listening)
    await impostor(sock)
    with pytest.raises(AuthenticationFailed, match="listener"):
        await dialling
    listening.close()


async def test_a_layout_mismatch_names_the_field_on_both_sides() -> None:
    other = Identity("here", make_layout(block_size=6))
    async with echo_listener() as listener:
        with pytest.raises(LayoutMismatch, match="block_size: here 6, there 4") as caught:
            await dial(listener.host, listener.port, "echo", other, "secret", soon())
        assert caught.value.field == "block_size"
        await until_rejected(listener, "LayoutMismatch")


async def test_another_protocol_version_is_named() -> None:
    async with echo_listener() as listener:
        connection = await raw(listener)
        await connection.send(Hello(99, "echo", bytes(32)))
        refused = await connection.receive(Refused)
        assert "protocol 99" in refused.reason
        await connection.close()


async def test_hostile_frames_after_the_handshake_end_the_connection() -> None:
    async with echo_listener() as listener:
        connection = await dial(listener.host, listener.port, "echo", HERE, "secret", soon())
        await asyncio.get_running_loop().sock_sendall(connection.socket, b"\x7f\xff\xff\xff")
        with pytest.raises(PeerLost):
            await connection.receive(Hello)
        await until_rejected(listener, "ProtocolError")
        await connection.close()


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "of another connection", "sent back"])
async def test_a_frame_that_is_not_the_next_one_ends_the_connection(what: str) -> None:
    async with echo_listener() as listener:
        connection, other = [await dial(listener.host, listener.port, "echo", HERE, "secret", soon()) for _ in range(2)]
        frame, following = (connection.sealed(encode_frame(Hello(1, "ping", b"nonce"))) for _ in range(2))
        match what:
            case "changed":
                frame[-20] ^= 1
            case "repeated":
                frame = frame + frame
            case "left out":
                frame = following
            case "of another connection":
                frame = other.sealed(encode_frame(Hello(1, "ping", b"nonce")))
            case "sent back":
                await asyncio.get_running_loop().sock_sendall(connection.socket, frame)
                header = await asyncio.get_running_loop().sock_recv(connection.socket, 4)
                frame = header + await asyncio.get_running_loop().sock_recv(connection.socket, 1000)
        await asyncio.get_running_loop().sock_sendall(connection.socket, frame)
        if what == "repeated":
            assert await connection.receive(Hello) == Hello(1, "ping", b"nonce")
        with pytest.raises(PeerLost):
            await connection.receive(Hello)
        await until_rejected(listener, "ProtocolError")
        for one in (connection, other):
            await one.close()


async def test_a_listener_that_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TransferTimeout):
        await dial(*silent.getsockname()[:2], "echo", HERE, "secret", soon(0.05))


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[:2]
    with pytest.raises(PeerLost, match="cannot connect"):
        await dial(*address, "echo", HERE, "secret", soon())


def test_a_socket_that_times_out_has_lost_its_peer() -> None:
    with pytest.raises(PeerLost), translated_errors():
        raise OSError(errno.ETIMEDOUT, "Connection timed out")  # a `TimeoutError`, as that of a deadline
    with pytest.raises(TimeoutError), translated_errors():
        raise TimeoutError
