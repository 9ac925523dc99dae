"""Reports of worker sides between processes: errors keep their class, and nothing is unpickled."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from kvferry.connectors.api import Failed, Loaded, Released, Saved
from kvferry.connectors.report_codec import decode_report, encode_report
from kvferry.core.errors import LeaseEnded, ProtocolError, TransferError


def test_events_are_read_as_they_were_written() -> None:
    report = [Loaded("a"), Released("b"), Saved("t", [0, 2])]
    assert decode_report(encode_report(report)) == report
    assert decode_report(encode_report([])) == []


def test_an_error_keeps_its_class_message_and_attributes() -> None:
    error = LeaseEnded("the lease ended")
    error.place = 3  # type: ignore[attr-defined]
    [failed] = decode_report(encode_report([Failed("r", error, "kept")]))
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.held_under) == ("r", "kept")
    assert type(failed.error) is LeaseEnded
    assert str(failed.error) == "the lease ended"
    assert vars(failed.error) == {"place": "3"}


def test_an_error_of_another_package_is_a_transfer_error() -> None:
    [failed] = decode_report(encode_report([Failed("r", ZeroDivisionError("a bug"))]))  # type: ignore[arg-type]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TransferError)
    assert "a bug" in str(failed.error)


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        pickle.dumps([1]),
        msgspec.msgpack.encode([["Loaded"]]),
        b"\x91\x92\xa6Loaded\xa1\xff",
    ],
)
def test_what_is_no_report_is_refused(encoded: bytes) -> None:
    with pytest.raises(ProtocolError, match="report that cannot be read"):
        decode_report(encoded)
