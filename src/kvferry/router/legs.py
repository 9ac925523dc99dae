"""The two legs of a request: what each instance is sent, and what its answer means."""

from __future__ import annotations

from enum import Enum
from random import getrandbits
from typing import Any

import msgspec

from kvferry.core.hand_off import RankAddress
from kvferry.core.timeline import Timeline
from kvferry.router.body import RequestBody
from kvferry.router.instance import KVSource
from kvferry.router.plan import is_batch
from kvferry.router.protocols.form import Form
from kvferry.router.upstream import Answer

HAND_OFF_FIELD = "kv_transfer_params"

MAX_PREFILL_ANSWER_BYTES = 16 * 2**20


class Verdict(Enum):
    """What a status says about who is at fault."""

    SERVED = "served"
    """The request was done, or is the client's fault: the answer is the client's."""
    BUSY = "busy"
    """Load: another instance may have room."""
    FAULT = "fault"
    """The instance failed: another may not."""


def verdict(status: int) -> Verdict:
    """What an answer's status means. A redirect is a fault: it leads past the router."""
    if status in (429, 503):
        return Verdict.BUSY
    return Verdict.FAULT if status >= 500 or 300 <= status < 400 else Verdict.SERVED


# What comes of a prefill leg.


class Prefilled(msgspec.Struct, frozen=True):
    """P has the KV ready. `params` is the ticket as P wrote it; None: P keeps nothing for another instance. `origin`:
    where that came from, if it says so."""

    form: Form
    params: msgspec.Raw | None
    origin: KVSource | None


class Refused(msgspec.Struct, frozen=True):
    """P says the request is wrong; its answer is the client's."""

    answer: Answer


class PrefillFailed(msgspec.Struct, frozen=True):
    """P did not do it, and that is not the client's fault. `by_decode`: but D's, whom it met."""

    reason: str
    by_decode: bool = False


PrefillOutcome = Prefilled | Refused | PrefillFailed


class PrefillUsage(msgspec.Struct, frozen=True):
    """What P says of its leg, as far as it says it: tokens, those it had cached, and its own stamps."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    timeline: Timeline | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Result(msgspec.Struct):
    timeline: Timeline | None = None


class _Params(msgspec.Struct):
    prefill_result: _Result | None = None


class _PrefillAnswer(msgspec.Struct):
    usage: _Usage | None = None
    kv_transfer_params: _Params | None = None


_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


def prefill_usage(answer: bytes) -> PrefillUsage:
    """From P's answer, whatever else is in it."""
    try:
        found = _ANSWER.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PrefillUsage()
    usage, params = found.usage or _Usage(), found.kv_transfer_params
    result, details = params.prefill_result if params else None, usage.prompt_tokens_details
    num_cached = min(max(0, details.cached_tokens if details else 0), max(0, usage.prompt_tokens))
    return PrefillUsage(max(0, usage.prompt_tokens), num_cached, result.timeline if result else None)


def shared_seed(body: RequestBody) -> dict[str, int]:
    """The seed field both legs get when the client gave none, so that D goes on as P began; empty when it did."""
    return {} if body.get("seed") is not None else {"seed": getrandbits(63)}


def is_stream_of_one(path: str, body: RequestBody) -> bool:
    """Whether the answer is a stream of one choice."""
    return body.get("stream") is True and is_of_one(path, body)


def is_of_one(path: str, body: RequestBody) -> bool:
    """Whether the answer has one choice."""
    several = any(body.get(field) not in (None, 1) for field in ("n", "best_of"))
    batch = path == "/v1/completions" and is_batch(body.raw("prompt"))
    return not (several or batch or body.get("use_beam_search"))


def repeats_itself(body: RequestBody) -> bool:
    """Whether a second answer of another engine's would be the same: greedy, or with a seed of the client's."""
    return body.get("temperature") == 0 or body.get("seed") is not None


def prefill_body(body: RequestBody, form: Form, seed: dict[str, int], kept: dict[str, Any] | None = None) -> bytes:
    """The prefill leg's body: one token, in one piece, and the KV kept for another instance. `kept`: from where P
    fetches what that has of the turns before.

    SGLang's P makes one token of whatever it is asked for, and wants to be asked for the same as D.
    """
    if form.meets_in_a_room:
        return body.encode(without=("stream_options",), **{**form.prefill_fields, "stream": False})
    fields: dict[str, Any] = {"max_tokens": 1, "n": 1, "stream": False, **seed, **form.prefill_fields}
    if "max_completion_tokens" in body:
        fields["max_completion_tokens"] = 1
    min_tokens = body.get("min_tokens")
    if isinstance(min_tokens, int):
        fields["min_tokens"] = min(min_tokens, 1)
    fields[HAND_OFF_FIELD] = {**form.produce, **kept, "transfer_id": form.transfer_id} if kept else form.produce
    return body.encode(without=("stream_options", "best_of", *form.prefill_without), **fields)


def decode_body(
    body: RequestBody, params: Any, seed: dict[str, int], form: Form, *, returns_ticket: bool, keeps: bool = False
) -> bytes:
    """The decode leg's body, with a ticket: the client's own, and the seed that P's token is drawn with.

    Unless `returns_ticket`, D keeps something for another turn only if the router takes its ticket off the answer
    (`keeps`): with its addresses, it would reach the client.
    """
    if form.meets_in_a_room and form.early is not None:
        return body.encode(**{**form.early, **seed})
    return body.encode(**{HAND_OFF_FIELD: params if returns_ticket else _with_keeping(params, keeps), **seed})


def _with_keeping(params: Any, keeps: bool) -> Any:
    if isinstance(params, msgspec.Raw):
        try:
            params = msgspec.json.decode(params, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # D will say what is wrong with it
            return params
    return {**params, "keep_for_next_turn": keeps}


def whole_body(body: RequestBody) -> bytes:
    """The body for one instance that does everything."""
    return body.encode()


class _Ticket(msgspec.Struct):
    remote_engine_id: str
    remote_host: str | None = None
    remote_port: int | None = None
    remote_ranks: list[RankAddress] | None = None
    remote_address_seal: str = ""
    remote_prefixes: Any = None
    """A key of kvferry's P2P connectors only."""


_TICKET = msgspec.json.Decoder(_Ticket)


def ticket_origin(params: msgspec.Raw) -> KVSource | None:
    """Where a ticket comes from, None when it does not say; without a port when nobody can ask there early."""
    try:
        ticket = _TICKET.decode(params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    port = (ticket.remote_port or 0) if ticket.remote_prefixes is not None else 0
    host, ranks = ticket.remote_host or "", ticket.remote_ranks
    seal = ticket.remote_address_seal
    return KVSource(engine_id=ticket.remote_engine_id, host=host, port=port, ranks=ranks, seal=seal)
