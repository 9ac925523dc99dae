"""Whatever comes from a socket, a parser says what it is or raises `ProtocolError`; and who serves, goes on serving."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kv_support import BlockRegion, make_layout, table_for

from kvferry.connectors.p2p.plan import HandOffMeta, decode_meta, encode_meta
from kvferry.core.errors import ConfigError, InvalidRequest, KvferryError, ProtocolError
from kvferry.core.messages.hand_off import PrefillResult, parse_hand_off
from kvferry.core.messages.wire import HEADER_BYTES, MAX_FRAME_BYTES, Message, decode_frame, encode_frame, frame_length
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.transport.connection import Connection, Hello, Identity, Proof, Refused
from kvferry.transport.control import Listener, dial
from kvferry.transport.fabric.base import FabricContext
from kvferry.transport.fabric.shm import ShmFabric
from kvferry.transport.fabric.tcp import ReadAnswer, ReadRequest, TcpFabric
from kvferry.transport.lookup_buffer.base import Source, Want
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.messages import (
    FromConsumer,
    KeyUpdate,
    Part,
    ProducerInfo,
    ReleaseKey,
    Renew,
    Select,
    Take,
    Unselect,
    Verify,
)
from kvferry.transport.memory import LayerPlace
from support.examples import examples

TOKEN = "secret"
LAYOUT = make_layout()
PATIENT = settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))

HONEST: list[tuple[Any, Any]] = [
    (Hello(1, "lookup", b"n" * 32), Hello),
    (Hello(1, "", b"n" * 32), Hello | Refused),
    (Proof(Identity("engine", LAYOUT), b"c" * 32), Proof),
    (Proof(Identity("engine", LAYOUT), b"c" * 32), Proof | Refused),
    (ProducerInfo(8, (LayerPlace(0, 16), LayerPlace(128, 32)), 30.0, {"tcp": {"host": "h", "port": 1}}), ProducerInfo),
    (Select(1, "key"), FromConsumer),
    (Renew(), FromConsumer),
    (KeyUpdate(3, 1, [Part(0, 1, 2, [5, 6])], b"meta", "taken"), KeyUpdate),
    (KeyUpdate(1, 2, take_confirmed=True, digest=b"d" * 8), KeyUpdate),
    (Verify(1, [(0, 8), (64, 8)]), FromConsumer),
    (ReadRequest(1, np.array([0, 8, 64, 8]).tobytes()), ReadRequest),
    (ReadAnswer(1, 16), ReadAnswer),
]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, Any]:
    """An honest frame's body with some bytes changed, put in or left out, and what it should have been."""
    message, kinds = draw(st.sampled_from(HONEST))
    body = bytearray(encode_frame(message)[HEADER_BYTES:])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        match draw(st.integers(0, 3)):
            case 0:
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                body[at:at] = draw(st.binary(min_size=1, max_size=9))
            case 2:
                del body[at : at + draw(st.integers(1, 12))]
            case _:
                body = body[:at]
    return bytes(body), kinds


@PATIENT
@given(damaged())
def test_a_damaged_frame_is_a_message_or_a_protocol_error(given_frame: tuple[bytes, Any]) -> None:
    body, kinds = given_frame
    try:
        message = decode_frame(body, kinds)
    except ProtocolError:
        return
    assert decode_frame(encode_frame(message)[HEADER_BYTES:], kinds) == message or message != message


@PATIENT
@given(st.binary(max_size=200), st.sampled_from([kinds for _, kinds in HONEST]))
@example(b"\x91" * 100_000, ProducerInfo)
def test_noise_is_a_message_or_a_protocol_error(body: bytes, kinds: Any) -> None:
    with suppress(ProtocolError):
        decode_frame(body, kinds)


@PATIENT
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_no_header_announces_more_than_a_frame_may_be(header: bytes) -> None:
    with suppress(ProtocolError):
        assert 0 < frame_length(header, MAX_FRAME_BYTES) <= MAX_FRAME_BYTES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TICKET_KEYS = [
    *("do_remote_prefill", "do_remote_decode", "transfer_id", "remote_engine_id", "remote_request_id", "remote_host"),
    *("remote_port", "remote_block_ids", "remote_num_tokens", "tp_size", "prefill_result", "unknown"),
]


@PATIENT
@given(st.dictionaries(st.sampled_from(TICKET_KEYS), json_values, max_size=8))
def test_any_kv_transfer_params_are_a_hand_off_or_an_invalid_request(params: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        parse_hand_off(params, "request")


@PATIENT
@given(st.text(max_size=60) | st.dictionaries(st.text(max_size=12), st.integers() | st.text()).map(msgspec.json.encode))
def test_any_transfer_config_is_one_or_a_config_error(text: str | bytes) -> None:
    with suppress(ConfigError):
        parse_transfer_config(text if isinstance(text, str) else text.decode())


def test_a_meta_of_no_text_is_a_protocol_error() -> None:
    body = encode_meta(HandOffMeta(7, [(7, "digest")], None)).replace(b"digest", b"\xff\xfe\xfd\xfc\xfb\xfa")
    with pytest.raises(ProtocolError):
        decode_meta(body)


@PATIENT
@given(st.data())
def test_a_damaged_meta_is_one_or_a_protocol_error(data: st.DataObject) -> None:
    body = bytearray(encode_meta(HandOffMeta(7, [(7, "d")], PrefillResult(first_token=3, seed=4))))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode_meta(bytes(body))


# Against those who serve.


@pytest.fixture
def region(make_region: Callable[..., BlockRegion]) -> Iterator[BlockRegion]:
    return make_region(16, seed=1)


@asynccontextmanager
async def serving(region: BlockRegion, handshake_s: float = 30) -> AsyncIterator[tuple[Listener, FabricLookupBuffer]]:
    """A producer that holds one sealed key, "here"."""
    identity = Identity("producer", region.memory.layout)
    context = FabricContext(region.memory, Listener(identity, TOKEN, handshake_s=handshake_s))
    buffer = FabricLookupBuffer(
        context, [ShmFabric(context), TcpFabric(context)], table_for(region.memory, EntryBounds(lease_s=60))
    )
    task = asyncio.create_task(buffer.run())
    buffer.table.open("here")
    buffer.table.insert("here", Part(0, region.memory.layout.num_layers, 0, [3, 4]))
    buffer.table.seal("here", encode_meta(HandOffMeta(8, [(8, "d")], PrefillResult(first_token=3, seed=4))))
    try:
        yield context.listener, buffer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def require_serves(listener: Listener, make_region: Callable[..., BlockRegion]) -> None:
    """An honest consumer still gets "here"."""
    own = make_region(16, seed=2)
    identity = Identity("consumer", own.memory.layout)
    context = FabricContext(own.memory, Listener(identity, TOKEN))
    consumer = FabricLookupBuffer(context, [TcpFabric(context)], table_for(own.memory))
    task = asyncio.create_task(consumer.run())
    source = Source(listener.host, listener.port, "producer")
    taken = await consumer.drop_select(Want("here", source, [0, 1], time.monotonic() + 10))
    assert taken.num_bytes == 2 * own.memory.layout.block_bytes
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until_closed(connection: Connection) -> None:
    """The other end hangs up, soon."""
    try:
        async with asyncio.timeout(30):
            while True:
                await connection.receive_into(memoryview(bytearray(1)))
    except KvferryError:
        pass


async def test_strangers_who_talk_nonsense(region: BlockRegion, make_region: Callable[..., BlockRegion]) -> None:
    rng = random.Random(1)
    async with serving(region, handshake_s=0.5) as (listener, _):
        for _ in range(60):
            reader, writer = await asyncio.open_connection(listener.host, listener.port)
            for _ in range(rng.randrange(1, 4)):
                noise = rng.randbytes(rng.randrange(1, 200))
                writer.write(noise if rng.random() < 0.5 else len(noise).to_bytes(4, "big") + noise)
            if rng.random() < 0.5:
                writer.write_eof()
            async with asyncio.timeout(30):
                await reader.read()
            writer.close()
        listener.handshake_s = 30  # time for the honest one
        await require_serves(listener, make_region)


class Noise(Message, frozen=True):
    """What no parser expects."""

    body: bytes


def anything_from_a_consumer(rng: random.Random) -> Any:
    select_id, number = rng.choice([0, 1, 2, 2**31]), rng.choice([-1, 0, 1, 2**40])
    key = rng.choice(["here", "gone", "", "k" * 600])
    return rng.choice(
        [
            Select(select_id, key),
            Unselect(select_id),
            Renew(),
            Take(select_id, 77 if number == 0 else number, number, rng.choice([-1, 0, 1, 2**40])),
            Verify(select_id, [(number, rng.choice([-1, 0, 8, 2**62]))]),
            ReleaseKey("gone" if key == "here" else key),
            KeyUpdate(select_id, number, take_confirmed=True),
            Hello(1, "lookup", b""),
        ]
    )


async def test_a_consumer_who_knows_the_token_and_not_the_manners(
    region: BlockRegion, make_region: Callable[..., BlockRegion]
) -> None:
    rng = random.Random(2)
    identity = Identity("rude", region.memory.layout)
    async with serving(region) as (listener, _):
        for _ in range(60):
            connection = await dial(listener.host, listener.port, "lookup", identity, TOKEN, time.monotonic() + 30)
            try:
                for _ in range(rng.randrange(1, 12)):
                    if rng.random() < 0.1:
                        noise = rng.randbytes(rng.randrange(1, 60))
                        unsealed = bytearray(len(noise).to_bytes(4, "big") + noise)
                        if rng.random() < 0.5:
                            connection.io.send(memoryview(unsealed))
                        else:
                            await connection.send(Noise(noise))
                    else:
                        await connection.send(anything_from_a_consumer(rng))
            except KvferryError:
                pass
            await connection.close()
        await require_serves(listener, make_region)


async def test_a_reader_who_asks_for_bytes_that_are_not_there(
    region: BlockRegion, make_region: Callable[..., BlockRegion]
) -> None:
    rng, size = random.Random(3), region.memory.num_bytes
    identity = Identity("rude", region.memory.layout)
    async with serving(region) as (listener, _):
        for _ in range(60):
            connection = await dial(listener.host, listener.port, "read", identity, TOKEN, time.monotonic() + 30)
            offset = rng.choice([-1, 0, size - 4, size, 2**62])
            length = rng.choice([-1, 0, 4, 8, size + 1, 2**62])
            spans = np.array([offset, length]).tobytes() + bytes(rng.choice([0, 0, 0, 1, 8, 15]))
            await connection.send(ReadRequest(1, spans))
            answer = await connection.receive(ReadAnswer)
            allowed = len(spans) == 16 and offset >= 0 and length > 0 and offset + length <= size
            assert bool(answer.refusal) is not allowed
            assert answer.num_bytes == (length if allowed else 0)
            connection.io.send(memoryview(rng.randbytes(rng.randrange(1, 60))))
            await connection.close()
        await require_serves(listener, make_region)


def anything_from_a_producer(rng: random.Random) -> Any:
    number = rng.choice([-1, 0, 1, 3, 2**40])
    part = Part(rng.choice([-1, 0, 2, 99]), rng.choice([-1, 0, 1, 3, 99]), number, [rng.choice([-1, 0, 3, 10**9])])
    return rng.choice(
        [
            *(
                KeyUpdate(0, number, [part]),
                KeyUpdate(0, number, meta=b"m"),
                KeyUpdate(0, number, end_reason="odd"),
                KeyUpdate(0, 0),
                KeyUpdate(5, 0),
            ),
            *(KeyUpdate(0, number, take_confirmed=True), KeyUpdate(0, 0, digest=b"?"), Select(1, "key")),
        ]
    )


async def test_a_producer_without_manners(make_region: Callable[..., BlockRegion]) -> None:
    rng, theirs, ours = random.Random(4), make_region(16, seed=1), make_region(16, seed=2)
    identity = Identity("producer", theirs.memory.layout)
    listener = Listener(identity, TOKEN)
    shm = ShmFabric(FabricContext(theirs.memory, listener))

    async def serve(connection: Connection) -> None:
        places = theirs.memory.geometry.places
        if rng.random() < 0.3:
            places = tuple(LayerPlace(rng.choice([-8, 0, 2**62]), rng.choice([-8, 0, 2**62])) for _ in places)
        await connection.send(ProducerInfo(rng.choice([16, 10**12]), places, 30.0, {"shm": shm.describe()}))
        await connection.receive(FromConsumer)
        for _ in range(rng.randrange(1, 8)):
            await connection.send(anything_from_a_producer(rng))

    listener.handle("lookup", serve)
    serving_task = asyncio.create_task(listener.serve())
    own = Identity("consumer", ours.memory.layout)
    context = FabricContext(ours.memory, Listener(own, TOKEN))
    consumer = FabricLookupBuffer(context, [ShmFabric(context)], table_for(ours.memory))
    running = asyncio.create_task(consumer.run())
    before = ours.bytes[4 * ours.memory.layout.span_bytes(0) :].copy()
    for _ in range(80):
        source = Source(listener.host, listener.port, "producer")
        with pytest.raises(KvferryError):
            await consumer.drop_select(Want("key", source, [0, 1, 2, 3], time.monotonic() + 0.3))
    span = ours.memory.layout.span_bytes(0)
    assert (ours.bytes[4 * span : 16 * span] == before[: 12 * span]).all()  # layer 0: no block but those asked for
    for task in (running, serving_task):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
