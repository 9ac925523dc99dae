"""An answer that one instance has begun and another goes on with.

Who asks for a stream with the header `X-Kvferry-Progress` gets a comment before each server-sent event: a `Mark`, which
says what tokens the event completes. Whoever has all marks can have another instance go on where the first broke off:
it sends the same request there, with a `Continuation` as `kv_transfer_params.continue_from`. The tokens of the answer
then come without a gap and without a repetition, in events of the same form: only the tokens so far have to be told,
since a draw is a function of (seed, position), and text, stop strings and counts are functions of the tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.errors import InvalidRequest
from kvferry.core.hand_off import Count

PROGRESS_HEADER = "X-Kvferry-Progress"
"""Asks for marks; in the answer it says that they are there."""

CONTINUE_KEY = "continue_from"
"""The key of a `Continuation` in `kv_transfer_params`."""

MARK = b": "
"""How a mark begins; it ends with its line."""

_LAST = b'"last":true}'


class Mark(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an event is of. The first of a stream has the fields of the whole answer; `last`: the finish reason is in
    this event, and what follows (usage, `[DONE]`) has no mark of its own."""

    tokens: list[Count] = []
    seed: int | None = None
    created: int | None = None
    num_cached_tokens: Count | None = None
    last: bool = False

    def encode(self) -> bytes:
        """The mark as a comment line, to be sent before its event."""
        return b": %b\n" % _encoder.encode(self)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Mark)


def decode_mark(line: bytes) -> Mark:
    """A mark from its line, without the line's end. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(line[len(MARK) :])


def is_last(line: bytes) -> bool:
    """Whether this mark's line is that of the last, without reading it whole."""
    return line.endswith(_LAST)


class Continuation(msgspec.Struct, kw_only=True):
    """An answer so far: its tokens, the seed they were drawn with, and what its chunks say of the whole: when it was
    created (seconds since the epoch) and how much of the prompt was cached."""

    token_ids: list[Count]
    seed: Annotated[int, Meta(ge=-(2**63))]
    created: Annotated[int, Meta(ge=0, lt=2**40)]
    num_cached_tokens: Count = 0

    def __post_init__(self) -> None:
        if self.seed >= 2**64:
            raise ValueError("a seed of more than 64 bits")


def parse_continuation(params: dict[str, Any] | None) -> Continuation | None:
    """The answer so far that a request's `kv_transfer_params` tell of, if they do. Raises `InvalidRequest`."""
    told = (params or {}).get(CONTINUE_KEY)
    if told is None:
        return None
    try:
        return msgspec.convert(told, Continuation)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"kv_transfer_params.{CONTINUE_KEY}: {error}", param="kv_transfer_params") from error
