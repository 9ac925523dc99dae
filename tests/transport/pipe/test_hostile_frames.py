"""Ends of pipes against peers that are not honest: named errors, and no memory for what a header merely claims."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_support import make_layout, soon
from pipe_support import CAPACITY, KINDS, TOKEN, serving

from kvferry.core.errors import KvferryError, PeerLost, ProtocolError, TransferTimeout
from kvferry.transport.connection import Connection, Identity, Message, decode_frame, encode_frame
from kvferry.transport.control import dial
from kvferry.transport.pipe.base import PipeReceiver, PipeSender, PipeSettings, pipe_kind
from kvferry.transport.pipe.messages import (
    MAX_MESSAGE_BYTES,
    Formed,
    Join,
    NoTensor,
    Published,
    Ready,
    TensorHeader,
)
from kvferry.transport.pipe.tensors import DTYPES, num_bytes_of, shaped
from support.examples import examples

SETTINGS = PipeSettings(capacity_bytes=CAPACITY, max_tensor_bytes=16 * CAPACITY)
BAD_HEADERS = {
    "an unknown dtype": TensorHeader("float31", [1]),
    "a dtype that is something else of torch": TensorHeader("load", [1]),
    "a negative size": TensorHeader("int8", [-1]),
    "two negative sizes": TensorHeader("int8", [-4, -4]),
    "too large": TensorHeader("int8", [16 * CAPACITY + 1]),
    "larger than any memory": TensorHeader("int8", [2**62]),
    "a product that overflows": TensorHeader("float64", [2**40, 2**40]),
    "an overflow hidden behind a zero": TensorHeader("float64", [0, 2**62, 2**62]),
    "too many dimensions": TensorHeader("int8", [1] * 65),
}
GARBAGE = {
    "an empty frame": b"\0\0\0\0",
    "a frame longer than is taken": (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
    "a frame of 4 GiB": b"\xff\xff\xff\xff",
    "not msgpack": b"\0\0\0\x04\xc1\xc1\xc1\xc1",
    "another message": bytes(encode_frame(Join("plain", "t"))),
    "a pickle": b"\0\0\0\x0f" + b"\x80\x04\x8c\x02os\x94\x8c\x06system",
}


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Connection]]:
    """(ours, theirs)."""
    pair = [Connection(end) for end in tcp_pair()]
    for connection in pair:
        connection.trust(Identity("peer", make_layout()), b"", b"")
    try:
        yield pair[0], pair[1]
    finally:
        for connection in pair:
            await connection.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        return dialled, listening.accept()[0]


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[PipeReceiver, Connection]]:
    """A receiver, and the connection on which its dishonest sender speaks."""
    async with connected() as (ours, theirs):
        receiver = await pipe_kind(KINDS["plain"], SETTINGS).open_receiver(ours, soon())
        try:
            yield receiver, theirs
        finally:
            await receiver.close()


async def refused(receiver: PipeReceiver, error: type[KvferryError] = ProtocolError) -> None:
    with pytest.raises(error):
        await receiver.recv_tensor(deadline=soon())
    with pytest.raises(error):
        await receiver.recv_tensor(deadline=soon())


@pytest.mark.parametrize("what", BAD_HEADERS)
async def test_headers_that_cannot_be(what: str) -> None:
    async with receiving() as (receiver, theirs):
        await theirs.send(BAD_HEADERS[what])
        await refused(receiver)


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_instead_of_a_header(what: str) -> None:
    async with receiving() as (receiver, theirs):
        await theirs.send_bytes([memoryview(GARBAGE[what])])
        await refused(receiver)


@pytest.mark.parametrize("num_bytes", [1, 3, 7, 40])
async def test_cut_off_in_the_middle(num_bytes: int) -> None:
    async with receiving() as (receiver, theirs):
        frames = bytes(encode_frame(TensorHeader("int8", [100]))) + bytes(100)
        await theirs.send_bytes([memoryview(frames[:num_bytes])])
        theirs.abort()
        await refused(receiver, PeerLost)


GROUP_LIES: dict[str, list[Message]] = {
    "an address that is none": [Published("0/0", b"nonsense")],
    "an endless store": [Published(str(number), b"x") for number in range(100)],
    "a value that is too long": [Published("k", b"x" * 10_000)],
    "a failure": [Formed("no")],
    "another message": [Ready()],
}


@pytest.mark.parametrize("lie", GROUP_LIES)
async def test_a_group_is_not_formed_with_liars(lie: str) -> None:
    async with connected() as (ours, theirs):
        for message in GROUP_LIES[lie]:
            await theirs.send(message)
        with pytest.raises((ProtocolError, PeerLost, TransferTimeout)):
            await pipe_kind("gloo", SETTINGS).open_receiver(ours, soon(1))


@pytest.mark.parametrize("name", KINDS)
async def test_a_peer_that_never_opens_its_end(name: str) -> None:
    async with connected() as (ours, _):
        kind = pipe_kind(KINDS[name], SETTINGS)
        for open_end in (kind.open_sender, kind.open_receiver):
            try:
                end: PipeSender | PipeReceiver = await open_end(ours, soon(0.1))
            except TransferTimeout:
                continue
            assert name == "plain", "which needs no word of its peer"
            await end.close()
            break


@pytest.mark.parametrize(
    "message", [Join("other", "t"), Join("", ""), NoTensor()], ids=["another kind", "nothing", "another message"]
)
async def test_a_wrong_beginning_is_no_pipe(message: Message) -> None:
    async with serving(KINDS["plain"], SETTINGS) as (listener, server):
        identity = Identity("r", make_layout())
        connection = await dial(listener.host, listener.port, "pipe", identity, TOKEN, soon())
        await connection.send(message)
        with pytest.raises(PeerLost):
            await connection.receive(NoTensor)
        await connection.close()
        with pytest.raises(TransferTimeout):
            await server.accept("t", soon(0.05))


async def test_two_pipes_with_one_ticket() -> None:
    async with serving(KINDS["plain"], SETTINGS) as (listener, server):
        identity = Identity("r", make_layout())
        connections = []
        accepting = asyncio.create_task(server.accept("t", soon()))
        for _ in range(2):
            connections.append(await dial(listener.host, listener.port, "pipe", identity, TOKEN, soon()))
            await connections[-1].send(Join("plain", "t"))
        sender = await accepting
        await sender.send_tensor(None, deadline=soon())
        answers = [asyncio.create_task(connection.receive(NoTensor)) for connection in connections]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert sum(answer.done() and answer.exception() is None for answer in answers) == 1
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        for connection in connections:
            await connection.close()


# Fuzz: whatever the bytes, a parser says what they mean or raises `ProtocolError`.

PARSED: list[tuple[type[Message], Callable[[Message], object]]] = [
    (TensorHeader, lambda header: shaped(torch.empty(num_bytes_of(header, 4096), dtype=torch.uint8), header)),  # type: ignore[arg-type]
    (Published, str),
    (Formed, str),
    (Join, str),
]
shapes = st.lists(st.one_of(st.integers(0, 8), st.integers()), max_size=70)
dtypes = st.one_of(st.sampled_from([*DTYPES]), st.text(max_size=20))


@settings(max_examples=examples(300), deadline=None)
@given(dtype=dtypes, shape=shapes)
def test_any_header(dtype: str, shape: list[int]) -> None:
    """What is accepted has as many bytes as it says, and becomes a tensor of that dtype and shape."""
    body = msgspec.msgpack.encode(["TensorHeader", dtype, [max(-(2**63), min(size, 2**64 - 1)) for size in shape]])
    try:
        header: TensorHeader = decode_frame(body, TensorHeader | NoTensor)
        num_bytes = num_bytes_of(header, 4096)
    except ProtocolError:
        return
    tensor = shaped(torch.empty(num_bytes, dtype=torch.uint8), header)
    assert (tensor.dtype, list(tensor.shape), tensor.nbytes) == (DTYPES[dtype], shape, num_bytes)


@pytest.mark.parametrize(("kind", "use"), PARSED, ids=lambda value: getattr(value, "__name__", ""))
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_any_bytes(kind: type[Message], use: Callable[[Message], object], data: st.DataObject) -> None:
    example = {
        TensorHeader: TensorHeader("int16", [2, 3]),
        Published: Published("k", b"v"),
        Formed: Formed("x"),
        Join: Join("plain", "t"),
    }[kind]
    body = bytearray(msgspec.msgpack.encode(example))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] + data.draw(st.binary(max_size=8))
    with suppress(ProtocolError):
        use(decode_frame(bytes(body), kind))
