"""A `TransferReport` as bytes, which the process of a rank sends to the process with the scheduler. Decoding does not
unpickle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvferry.connectors.api import TransferEvent, TransferReport
from kvferry.core.errors import KvferryError, ProtocolError, TransferError
from kvferry.transport.transfer_loop import translated


class _Error(msgspec.Struct, frozen=True, array_like=True):
    """A `KvferryError`: its class, its message, and its attributes as text."""

    kind: str
    message: str
    facts: dict[str, str]


def encode_report(report: Sequence[TransferEvent]) -> bytes:
    """Encode a report. Errors keep their class and message."""
    return _encoder.encode(report)


def decode_report(encoded: bytes) -> TransferReport:
    """Decode a report. Raises `ProtocolError` if it is malformed."""
    try:
        return _decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a rank's report that cannot be read: {error}") from error


def _pack(error: Any) -> _Error:
    """Called by msgspec for errors, the only values in a report that it cannot encode. A connector of another package
    may report an error that is not a `KvferryError`."""
    error = translated(error)
    return _Error(type(error).__name__, str(error), {name: str(value) for name, value in vars(error).items()})


def _unpack(_: type, value: Any) -> KvferryError:
    """Called by msgspec to decode an error. Raises `DecodeError` if the error is malformed."""
    packed = msgspec.convert(value, _Error)
    kinds = {kind.__name__: kind for kind in _subclasses(KvferryError)}
    kind = kinds.get(packed.kind, TransferError)
    error = kind.__new__(kind)  # the constructor of its class takes other arguments than the message
    Exception.__init__(error, packed.message)
    vars(error).update(packed.facts)
    return error


def _subclasses(kind: type[KvferryError]) -> Iterator[type[KvferryError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _subclasses(subclass)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(TransferReport, dec_hook=_unpack)
