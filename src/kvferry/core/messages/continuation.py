"""An answer that one instance has begun and another continues.

A request for a stream with the header `X-Kvferry-Progress` gets a comment before each server-sent event: a
`StreamMark`, which contains the tokens that the event completes. A client that has all marks can let another instance
continue the answer: it sends the same request there, with a `Continuation` as `kv_transfer_params.continue_from`. The
tokens of the answer then arrive without a gap or a repetition, in events of the same form. Only the tokens so far are
needed, because each random number is a function of (seed, position), and text, stop strings and counts are functions
of the tokens. All else that the answer is a function of has a name in the first mark (`answer_name`), and an instance
whose own name for the request differs does not continue it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import Count, prefix_digests

PROGRESS_HEADER = "X-Kvferry-Progress"
"""The header that requests marks, and announces them in the response."""

CONTINUE_KEY = "continue_from"
"""The key of a `Continuation` in `kv_transfer_params`."""

MARK_PREFIX = b": "
"""The beginning of a mark, which is one line."""

LAST_MARK_SUFFIX = b'"last":true}'
"""The end of a mark with `last`, which therefore is the last field of `StreamMark`."""


class StreamMark(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The content of an event: token ids, and in a stream's first mark the fields that hold for the whole answer.
    `last`: the finish reason is in this event; what follows (usage, `[DONE]`) has no mark."""

    tokens: list[Count] = []
    seed: int | None = None
    created: int | None = None
    num_cached_tokens: Count | None = None
    answer: str = ""
    """The `answer_name`."""
    last: bool = False

    def encode(self) -> bytes:
        """The mark as a comment line, to be sent before its event."""
        return b": %b\n" % _encoder.encode(self)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StreamMark)


def decode_mark(line: bytes) -> StreamMark:
    """The mark in a line, given without its newline. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(line[len(MARK_PREFIX) :])


def is_last(line: bytes) -> bool:
    """True if this is the line of a stream's last mark, without decoding it."""
    return line.endswith(LAST_MARK_SUFFIX)


class Continuation(msgspec.Struct, kw_only=True):
    """An answer so far: its tokens, the seed with which they were sampled, its `answer_name`. `created`
    (seconds since the epoch) and `num_cached_tokens` are repeated in all its chunks."""

    token_ids: list[Count]
    seed: Annotated[int, Meta(ge=-(2**63))]
    created: Annotated[int, Meta(ge=0, lt=2**40)]
    num_cached_tokens: Count = 0
    answer: Annotated[str, Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        if self.seed >= 2**64:
            raise ValueError("a seed of more than 64 bits")


def parse_continuation(params: dict[str, Any] | None) -> Continuation | None:
    """The answer so far in a request's `kv_transfer_params`; None if there is none. Raises `InvalidRequest`."""
    value = (params or {}).get(CONTINUE_KEY)
    if value is None:
        return None
    try:
        return msgspec.convert(value, Continuation)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"kv_transfer_params.{CONTINUE_KEY}: {error}", param="kv_transfer_params") from error


def answer_name(
    sampling_digest: str, eos_token_ids: Collection[int], prompt_token_ids: Sequence[int], salt: str, parsers: str = ""
) -> str:
    """A digest of 32 hexadecimal digits. It covers all that determines an answer besides the client's own parameters
    and the seed: model and sampler (`core.sampling.sampling_digest`), end tokens, prompt with cache salt, and
    parsers."""
    [(_, prompt)] = prefix_digests(prompt_token_ids, [len(prompt_token_ids)], salt)
    facts = [sampling_digest, sorted(eos_token_ids), prompt, *([parsers] if parsers else [])]
    return hashlib.sha256(_encoder.encode(facts)).hexdigest()[:32]
