import msgspec
import pytest

from kvferry.core.errors import ProtocolError
from kvferry.core.messages.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameReader,
    decode_frame,
    encode_frame,
    frame_length,
    seal_frame,
)
from kvferry.testing.kv import make_layout
from kvferry.transport.connection import Hello, Identity, Proof
from kvferry.transport.lookup_buffer.messages import FromConsumer, KeyUpdate, Part, ProducerInfo, Select
from kvferry.transport.memory import LayerPlace


def test_what_is_encoded_is_decoded() -> None:
    parts = [Part(0, 1, 2, [5, 6])]
    for message, kinds in [
        (Proof(Identity("engine", make_layout()), b"code"), Proof),
        (KeyUpdate(3, 1, parts, b"meta"), KeyUpdate),
        (
            ProducerInfo(8, (LayerPlace(0, 16), LayerPlace(128, 32)), 30.0, {"tcp": {"host": "h", "port": 1}}),
            ProducerInfo,
        ),
        (Select(1, "key"), FromConsumer),
    ]:
        frame = encode_frame(message)
        assert frame_length(frame[:HEADER_BYTES], MAX_FRAME_BYTES) == len(frame) - HEADER_BYTES
        assert decode_frame(frame[HEADER_BYTES:], kinds) == message


@pytest.mark.parametrize("length", [0, 1025, 2**32 - 1])
def test_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="frame"):
        frame_length(length.to_bytes(4, "big"), 1024)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80\x04K\x01.",
        bytes(encode_frame(Hello(1, "lookup", b"n"))[HEADER_BYTES:-1]),
        msgspec.msgpack.encode(["Elsewhere", 1]),
        msgspec.msgpack.encode(["Hello", "one", "lookup", b"n"]),
        msgspec.msgpack.encode(["Hello", 1, "lookup", b"n", "and more"]),
        msgspec.msgpack.encode(["Select", 1, "key"]),
        b"\x94\xa5Hello\x01\xa2\xff\xfe\xc4\x01n",
        b"\x91" * 100_000,
    ],
)
def test_garbage_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_frame(body, Hello)


def test_deep_nesting_where_anything_is_taken_is_a_protocol_error() -> None:
    head = msgspec.msgpack.encode(["ProducerInfo", 1, 1.0])[1:]
    with pytest.raises(ProtocolError):
        decode_frame(b"\x94" + head + b"\x81\xa3tcp\x81\xa1x" + b"\x91" * 100_000, ProducerInfo)


def test_a_sealed_frame_that_was_changed_is_refused() -> None:
    key = b"k" * 32
    body = bytes(seal_frame(encode_frame(Select(1, "key")), key, 7)[HEADER_BYTES:])
    assert decode_frame(body, FromConsumer, key, 7) == Select(1, "key")
    for place in range(len(body)):
        changed = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        with pytest.raises(ProtocolError, match="modified"):
            decode_frame(changed, FromConsumer, key, 7)
    for cut in (body[:-1], body[:5], b"x", body + b"x"):
        with pytest.raises(ProtocolError, match="modified"):
            decode_frame(cut, FromConsumer, key, 7)
    with pytest.raises(ProtocolError, match="modified"):
        decode_frame(body, FromConsumer, b"another" * 4, 7)
    with pytest.raises(ProtocolError, match="repeated"):
        decode_frame(body, FromConsumer, key, 8)


def test_too_long_a_message_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="longer"):
        encode_frame(Select(1, "k" * MAX_FRAME_BYTES))


@pytest.mark.parametrize("portion", [1, 3, 10_000])
def test_a_reader_gives_each_message_once_it_is_complete(portion: int) -> None:
    sent = [Select(number, "k" * number) for number in range(1, 40)]
    data, reader, found = b"".join(map(bytes, map(encode_frame, sent))), FrameReader(FromConsumer), []
    for start in range(0, len(data) - 1, portion):
        found += reader.feed(data[start : min(start + portion, len(data) - 1)])
    assert found == sent[:-1]
    assert [*found, *reader.feed(data[-1:])] == sent


def test_a_reader_keeps_no_more_than_its_limit() -> None:
    with pytest.raises(ProtocolError, match="at most 10"):
        list(FrameReader(FromConsumer, limit=10).feed(bytes(encode_frame(Select(1, "key" * 10)))))
