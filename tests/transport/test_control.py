import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from kv_support import make_layout, soon

from kvferry.core.errors import (
    AuthenticationFailed,
    ConfigError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    TransferTimeout,
)
from kvferry.core.messages.wire import encode_frame
from kvferry.transport import control
from kvferry.transport.connection import (
    PROTOCOL_VERSION,
    Connection,
    Hello,
    Identity,
    Proof,
    Refused,
    translated_errors,
)
from kvferry.transport.control import Listener, dial
from support.waiting import eventually

HERE = Identity("here", make_layout())
THERE = Identity("there", make_layout())


@asynccontextmanager
async def echo_listener(token: str = "secret", **options: float) -> AsyncIterator[Listener]:
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


async def test_an_unknown_purpose_is_refused() -> None:
    async with echo_listener() as listener:
        with pytest.raises(ProtocolError, match="no service 'other'"):
            await dial(listener.host, listener.port, "other", HERE, "secret", soon())


async def test_another_protocol_version_is_named() -> None:
    async with echo_listener() as listener:
        connection = await raw(listener)
        await connection.send(Hello(99, "echo", bytes(32)))
        refused = await connection.receive(Refused)
        assert "protocol 99" in refused.reason
        await connection.close()


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


async def test_who_says_nothing_is_not_waited_for() -> None:
    async with echo_listener(handshake_s=0.05) as listener:
        connection = await raw(listener)
        with pytest.raises(PeerLost):
            await connection.receive(Refused)
        await until_rejected(listener, "TransferTimeout")
        await connection.close()


async def test_a_listener_that_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TransferTimeout):
        await dial(*silent.getsockname()[:2], "echo", HERE, "secret", soon(0.05))


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[:2]
    with pytest.raises(PeerLost, match="cannot connect"):
        await dial(*address, "echo", HERE, "secret", soon())


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


async def raw(listener: Listener) -> Connection:
    sock = socket.create_connection((listener.host, listener.port))
    return Connection(sock)


def test_a_socket_that_times_out_has_lost_its_peer() -> None:
    with pytest.raises(PeerLost), translated_errors():
        raise OSError(errno.ETIMEDOUT, "Connection timed out")  # a `TimeoutError`, as that of a deadline
    with pytest.raises(TimeoutError), translated_errors():
        raise TimeoutError


async def is_refused(mute: socket.socket) -> bool:
    """Whether it was closed at once; what is not is told nothing until the handshake is too late."""
    mute.setblocking(False)
    return await asyncio.get_running_loop().sock_recv(mute, 1) == b""


async def test_who_does_not_say_who_they_are_keep_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
    async with echo_listener(handshake_s=3600) as listener, AsyncExitStack() as stack:
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


async def test_strangers_are_bounded_wherever_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_UNAUTHENTICATED", 2)
    async with echo_listener(handshake_s=3600) as listener, AsyncExitStack() as stack:
        addresses = [("127.0.0.2", 0), ("127.0.0.3", 0), ("127.0.0.4", 0)]
        mutes = [
            stack.enter_context(socket.create_connection((listener.host, listener.port), source_address=address))
            for address in addresses
        ]
        assert await is_refused(mutes[-1])
        mutes[0].close()
        await eventually(lambda: listener.statistics()["open_connections"] == 1)
