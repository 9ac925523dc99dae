"""The start protocol, both ends."""

from __future__ import annotations

import os

import pytest

from kvferry.core.errors import ProtocolError
from kvferry.fleet.ready import InstanceReady, ReadyWriter, StartProgress, parse_message


def test_what_is_written_is_what_is_read() -> None:
    read, write = os.pipe()
    writer = ReadyWriter(write)
    writer.progress("loading weights", 0.4)
    writer.ready({"url": "http://a:1", "role": "decode"})
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        assert [parse_message(line) for line in lines] == [
            StartProgress(0.4, "loading weights"),
            InstanceReady("http://a:1"),
        ]


def test_a_controller_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    ReadyWriter(write).progress("loading", 0.5)
    os.close(write)


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"nonsense", b'{"url": 3}', b'{"progress": "much"}'])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_message(line)
