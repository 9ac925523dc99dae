"""The start protocol, both ends."""

from __future__ import annotations

import os

import pytest

from kvferry.core.errors import ProtocolError
from kvferry.core.messages.wire import encode_frame
from kvferry.fleet.processes.ready import MAX_MESSAGE_BYTES, InstanceReady, ReadyWriter, StartProgress, start_messages


@pytest.mark.parametrize("portion", [1, 5, 4096])
def test_what_is_written_is_what_is_read(portion: int) -> None:
    read, write = os.pipe()
    writer = ReadyWriter(write)
    writer.progress("loading weights", 0.4)
    writer.ready({"url": "http://a:1", "role": "decode"})
    os.close(write)
    messages, found = start_messages(), []
    while chunk := os.read(read, portion):
        found += messages.feed(chunk)
    os.close(read)
    assert found == [StartProgress(0.4, "loading weights"), InstanceReady("http://a:1")]


def test_a_controller_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    ReadyWriter(write).progress("loading", 0.5)
    os.close(write)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x00",
        b'{"url":"http://a:1"}\n',
        b"\x00\x00\x00\x01\xc1",
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        bytes(encode_frame(StartProgress("much"))),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(start_messages().feed(data))
