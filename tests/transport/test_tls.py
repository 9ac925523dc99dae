"""TLS between instances: who may speak to whom, and what each side is told."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from kv_support import BlockRegion, make_layout, soon
from numpy.typing import NDArray

from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.connection import PROTOCOL_VERSION, Connection, Hello, Identity
from kvferry.transport.control import Listener, dial
from kvferry.transport.fabric.base import FABRICS, FabricContext, build_fabrics, fabric_class
from kvferry.transport.lookup_buffer.base import check as check_config
from kvferry.transport.memory_vector import MemoryVector
from kvferry.transport.options import TransportOptions
from kvferry.transport.tls import ChannelTls, channel_tls, encrypt
from support.certificates import Authority
from support.libraries import require_library
from support.waiting import eventually

HERE, THERE = Identity("here", make_layout()), Identity("there", make_layout())
PING = Hello(PROTOCOL_VERSION, "ping", b"")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def options(authority: Authority) -> dict[str, str]:
    return authority.options(*authority.issue())


@pytest.fixture(scope="module")
def member(options: dict[str, str]) -> ChannelTls:
    found = channel_tls(TransportOptions(**options))
    assert found is not None
    return found


@asynccontextmanager
async def echo_listener(tls: ChannelTls | None) -> AsyncIterator[Listener]:
    async def echo(connection: Connection) -> None:
        while True:
            await connection.send(await connection.receive(Hello))

    listener = Listener(THERE, "secret", tls=tls)
    listener.handle("echo", echo)
    serving = asyncio.create_task(listener.serve())
    try:
        yield listener
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def call(listener: Listener, tls: ChannelTls | None) -> None:
    connection = await dial(listener.host, listener.port, "echo", HERE, "secret", soon(), tls)
    try:
        await connection.send(PING)
        assert await connection.receive(Hello) == PING
    finally:
        await connection.close()


def trusting(ca: Path, cert: Path, key: Path) -> ChannelTls:
    """As `channel_tls`, for what it would refuse at start: a certificate that went bad later."""
    good = Authority(cert.parent / "good")
    made = channel_tls(TransportOptions(**good.options(*good.issue())))
    assert made is not None
    for context in (made.server, made.client):
        context.load_cert_chain(cert, key)
        context.load_verify_locations(ca)
    return made


async def test_members_speak_under_tls(member: ChannelTls) -> None:
    async with echo_listener(member) as listener:
        await call(listener, member)
        await asyncio.gather(*(call(listener, member) for _ in range(20)))
        assert listener.statistics().keys() == {"open_connections"}


async def test_what_is_said_cannot_be_read_on_the_way(member: ChannelTls) -> None:
    seen = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(listener.host, listener.port)
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer), return_exceptions=True)

    async with echo_listener(member) as listener, await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        port = between.sockets[0].getsockname()[1]
        connection = await dial("127.0.0.1", port, "echo", HERE, "secret", soon(), member)
        await connection.send(PING)
        await connection.receive(Hello)
        await connection.close()
    assert len(seen) > 1000
    assert b"there" not in seen, "the listener's name"
    assert b"ping" not in seen


@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_one_side_without_tls_is_told_on_both(
    member: ChannelTls, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    dialler, listening = (member, None) if who == "listener" else (None, member)
    async with echo_listener(listening) as listener:
        with caplog.at_level(logging.WARNING), pytest.raises(ProtocolError, match=r"TLS.*tls_cert, tls_key and tls_ca"):
            await call(listener, dialler)
        await eventually(lambda: "rejected_ProtocolError" in listener.statistics())
        assert "the peer uses" in caplog.text
        await call(listener, listening)


async def test_a_certificate_of_another_authority_is_refused(member: ChannelTls, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    stranger = channel_tls(TransportOptions(**other.options(*other.issue())))
    for ours, theirs in ((member, stranger), (stranger, member)):
        async with echo_listener(theirs) as listener:
            with pytest.raises(
                AuthenticationFailed, match=r"certificate is refused: .*(issuer|self-signed)"
            ) as refusal:
                await call(listener, ours)
            assert f":{listener.port}" in str(refusal.value)
            await eventually(lambda: "rejected_AuthenticationFailed" in listener.statistics())


async def test_a_diallers_certificate_of_another_authority_is_refused(
    member: ChannelTls, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It believes the listener, and is not believed."""
    forged = trusting(authority.ca, *Authority(tmp_path).issue())
    async with echo_listener(member) as listener:
        with pytest.raises(AuthenticationFailed, match=r"refuses the certificate of this instance.*unknown ca"):
            await call(listener, forged)
        await eventually(lambda: "rejected_AuthenticationFailed" in listener.statistics())
        assert "127.0.0.1:" in caplog.text, "the log says who it was"
        await call(listener, member)


@pytest.mark.parametrize("whose", ["dialler", "listener"])
async def test_an_expired_certificate_is_refused_by_name(
    member: ChannelTls, authority: Authority, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    expired = trusting(authority.ca, *authority.expired())
    ours, theirs = (expired, member) if whose == "dialler" else (member, expired)
    async with echo_listener(theirs) as listener:
        with pytest.raises(AuthenticationFailed, match=r"certificate (has )?expired"):
            await call(listener, ours)
        await eventually(lambda: "rejected_AuthenticationFailed" in listener.statistics())
        assert "expired" in caplog.text


async def test_a_dialler_without_a_certificate_is_refused(member: ChannelTls, authority: Authority) -> None:
    nobody = ssl.create_default_context(cafile=str(authority.ca))
    nobody.check_hostname = False
    async with echo_listener(member) as listener:
        with pytest.raises(KvferryError, match="certificate"):
            await call(listener, ChannelTls(member.server, nobody))
        await eventually(lambda: "rejected_AuthenticationFailed" in listener.statistics())


HOSTILE = {
    "the beginning of a handshake": b"\x16\x03\x01\x02\x00",
    "a handshake of garbage": b"\x16\x03\x01\x00\x40" + bytes(range(64)),
    "an endless record": b"\x16\x03\x03\xff\xff" + bytes(2**16),
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "plain frames": (5).to_bytes(4, "big") + b"abcde" * 3000,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
    **{f"random {seed}": b"\x16" + random.Random(seed).randbytes(300) for seed in range(8)},
}


@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bytes_end_their_own_connection_only(member: ChannelTls, name: str, tls: bool) -> None:
    spoken = member if tls else None
    async with echo_listener(spoken) as listener:
        reader, writer = await asyncio.open_connection(listener.host, listener.port)
        writer.write(HOSTILE[name])
        writer.write_eof()
        async with asyncio.timeout(10):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(2**20)
        writer.close()
        await call(listener, spoken)


async def test_who_stops_in_the_handshake_is_not_waited_for(member: ChannelTls) -> None:
    listener = Listener(THERE, "secret", tls=member, handshake_s=0.05)
    serving = asyncio.create_task(listener.serve())
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    writer.write(b"\x16\x03\x01\x02\x00")
    assert await reader.read() == b""
    assert listener.statistics()["rejected_TransferTimeout"] == 1
    writer.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def joined(tls: ChannelTls) -> tuple[Connection, Connection]:
    """Two connections that are each other's peer, under TLS."""
    listening = socket.create_server(("127.0.0.1", 0))
    ours = Connection(socket.create_connection(listening.getsockname()))
    theirs = Connection(listening.accept()[0])
    listening.close()
    await asyncio.gather(encrypt(ours, tls.client, server_side=False), encrypt(theirs, tls.server, server_side=True))
    return ours, theirs


@pytest.mark.parametrize("longest", [1, 40, 5000, 20_000, 3 * 2**20])
async def test_bytes_go_between_the_places_they_belong_to(member: ChannelTls, longest: int) -> None:
    rng = random.Random(longest)
    lengths = [rng.randint(1, longest) for _ in range(max(5, min(700, 2**21 // longest)))]
    starts = np.cumsum([0, *(length + 1 for length in lengths)])[:-1]
    source = np.frombuffer(rng.randbytes(int(starts[-1]) + lengths[-1]), np.uint8).copy()
    target = np.zeros_like(source)
    order = rng.sample(range(len(lengths)), len(lengths))
    addresses, table = starts[order], np.array(lengths, np.int64)[order]
    ours, theirs = await joined(member)

    async def receive() -> None:
        vector = MemoryVector(addresses + target.ctypes.data, table)
        while vector.num_left:
            await theirs.readable()
            try:
                theirs.io.receive_vector(vector)
            except BlockingIOError:
                continue

    sending = asyncio.create_task(ours.send(PING, MemoryVector(addresses + source.ctypes.data, table)))
    assert await theirs.receive(Hello) == PING
    await asyncio.gather(sending, receive())
    for start, length in zip(starts.tolist(), lengths, strict=True):
        assert (target[start : start + length] == source[start : start + length]).all()
    assert not target[starts[1:] - 1].any(), "nothing between them was written"
    await ours.close()
    await theirs.close()


def whole(array: NDArray[np.uint8]) -> MemoryVector:
    """All bytes of an array, which the caller keeps."""
    return MemoryVector(np.array([array.ctypes.data]), np.array([len(array)]))


async def test_a_send_that_is_cut_off_ends_the_connection(member: ChannelTls) -> None:
    ours, theirs = await joined(member)
    source = np.ones(64 * 2**20, np.uint8)
    sending = asyncio.create_task(ours.send(PING, whole(source)))
    await theirs.receive_into(memoryview(bytearray(100)))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(PeerLost):
        await ours.send(PING)
    with pytest.raises(PeerLost):
        await theirs.receive_into(memoryview(bytearray(2**27)))
    await ours.close()
    await theirs.close()


async def test_an_aborted_connection_gives_out_nothing_that_is_not_clear_text(member: ChannelTls) -> None:
    ours, theirs = await joined(member)
    await ours.send(PING, whole(np.full(100_000, 7, np.uint8)))
    await theirs.receive(Hello)
    theirs.abort()
    found = bytearray(100_000)
    with pytest.raises(PeerLost):
        await theirs.receive_into(memoryview(found + bytearray(1)))
    await ours.close()
    await theirs.close()
    assert set(found) <= {0, 7}


# What is wrong is known at start.


def check(**extras: object) -> None:
    check_config(KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config=extras))


def test_good_files_are_taken(options: dict[str, str], authority: Authority) -> None:
    check(**options)
    check(transport="tcp", **options)
    cert, key = authority.issue("joined")
    cert.write_text(cert.read_text() + key.read_text())
    check(tls_cert=str(cert), tls_ca=str(authority.ca))


@pytest.mark.parametrize("key", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "garbage", "other"])
def test_a_wrong_file_is_named(options: dict[str, str], tmp_path: Path, key: str, kind: str) -> None:
    path = tmp_path / "file.pem"
    match kind:
        case "folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "garbage":
            path.write_bytes(os.urandom(2000))
        case "other":
            path = Path(options["tls_ca"] if key != "tls_ca" else options["tls_key"])
    with pytest.raises(ConfigError, match=key) as refusal:
        check(**(options | {key: str(path)}))
    assert str(path) in str(refusal.value)


def test_a_key_with_a_password_is_refused_and_not_asked_for(options: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", options["tls_key"], "-out", str(path), "-passout", "pass:abcd"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="without a password"):
        check(**(options | {"tls_key": str(path)}))


def test_a_certificate_that_others_would_refuse_is_refused_at_start(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert .*expired"):
        check(**authority.options(*authority.expired()))
    other = Authority(tmp_path)
    with pytest.raises(ConfigError, match=r"tls_cert .*(issuer|self-signed)"):
        check(**(other.options(*other.issue()) | {"tls_ca": str(authority.ca)}))


@pytest.mark.parametrize("key", ["tls_key", "tls_ca", "tls_control_only"])
def test_half_a_configuration_is_named(options: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} needs .*tls_cert"):
        check(**{key: True if key == "tls_control_only" else options[key]})
    with pytest.raises(ConfigError, match=r"tls_cert needs .*tls_ca"):
        check(tls_cert=options["tls_cert"], tls_key=options["tls_key"])


@pytest.mark.parametrize("transport", ["nixl", "mooncake", "gloo", "nccl"])
def test_a_medium_with_channels_of_its_own_is_refused(options: dict[str, str], transport: str) -> None:
    require_library(transport)
    with pytest.raises(ConfigError, match=f"{transport} moves KV over a channel of its own.*tls_control_only"):
        check(transport=transport, **options)
    check(transport=transport, tls_control_only=True, **options)


def test_which_media_tls_covers() -> None:
    assert {name for name in FABRICS.table if fabric_class(name).under_tls} == {"shm", "tcp", "cuda_ipc"}


async def test_a_fabric_that_is_not_covered_is_not_built(
    member: ChannelTls, make_region: Callable[..., BlockRegion]
) -> None:
    region = make_region()
    listener = Listener(HERE, "secret", tls=member)
    context = FabricContext(region.memory, listener)
    with pytest.raises(ConfigError, match="TLS does not cover"):
        build_fabrics("nixl", context)
    assert [fabric.name for fabric in build_fabrics("auto", context)] == ["shm", "tcp"]
    listener.close()
