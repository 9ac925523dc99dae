"""A `TransferReport` as bytes, for a rank's process to send to the one with the scheduler. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvferry.connectors.api import TransferReport
from kvferry.core.errors import KvferryError, ProtocolError, TransferError
from kvferry.core.hand_off import PrefillResult


class _Error(msgspec.Struct, frozen=True, array_like=True):
    """An error of the tree: its class, its words, and what it carries beside them, as text."""

    kind: str
    message: str
    facts: dict[str, str]


class _Report(msgspec.Struct, frozen=True, array_like=True):
    loaded: list[str]
    failed: dict[str, _Error]
    released: list[str]
    prefill_results: dict[str, PrefillResult]
    loaded_tokens: dict[str, int]


_decoder = msgspec.msgpack.Decoder(_Report)


def encode_report(report: TransferReport) -> bytes:
    """For `decode_report`. Errors keep their class and words."""
    failed = {request_id: _pack(error) for request_id, error in report.failed.items()}
    released, results = sorted(report.released), report.prefill_results
    return msgspec.msgpack.encode(_Report(sorted(report.loaded), failed, released, results, report.loaded_tokens))


def decode_report(encoded: bytes) -> TransferReport:
    """The other way. Raises `ProtocolError` on what no rank sends."""
    try:
        report = _decoder.decode(encoded)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a rank's report that cannot be read: {error}") from error
    failed = {request_id: _unpack(error) for request_id, error in report.failed.items()}
    return TransferReport(
        loaded=set(report.loaded),
        loaded_tokens=report.loaded_tokens,
        failed=failed,
        released=set(report.released),
        prefill_results=report.prefill_results,
    )


def _pack(error: KvferryError) -> _Error:
    return _Error(type(error).__name__, str(error), {name: str(fact) for name, fact in vars(error).items()})


def _unpack(packed: _Error) -> KvferryError:
    kinds = {kind.__name__: kind for kind in _tree(KvferryError)}
    kind = kinds.get(packed.kind, TransferError)
    error = kind.__new__(kind)  # its own constructor would make the words anew, from what it was given
    Exception.__init__(error, packed.message)
    vars(error).update(packed.facts)
    return error


def _tree(kind: type[KvferryError]) -> Iterator[type[KvferryError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _tree(narrower)
