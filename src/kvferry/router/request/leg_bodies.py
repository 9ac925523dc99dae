"""The bodies of the two legs of a request, and what a prefill instance's answer says."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.core.entropy import RANDOM
from kvferry.core.messages.hand_off import RankAddress
from kvferry.core.messages.instance_facts import KVSource
from kvferry.core.messages.timeline import Timeline
from kvferry.router.body import RequestBody
from kvferry.router.choice.decisions import PrefillUsage
from kvferry.router.choice.plan import is_batch
from kvferry.router.protocols.form import Form

HAND_OFF_FIELD = "kv_transfer_params"

_ONE = (None, 1)
"""Numbers of choices that make one."""


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
    """Read it from P's answer, whatever else is in it."""
    try:
        found = _ANSWER.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PrefillUsage()
    usage, params = found.usage or _Usage(), found.kv_transfer_params
    result, details = params.prefill_result if params else None, usage.prompt_tokens_details
    num_cached = min(max(0, details.cached_tokens if details else 0), max(0, usage.prompt_tokens))
    return PrefillUsage(max(0, usage.prompt_tokens), num_cached, result.timeline if result else None)


def shared_seed(body: RequestBody) -> dict[str, int]:
    """The seed field that both legs get if the client gave none, so that D continues with P's random numbers; empty if
    it did."""
    return {} if body.values.get("seed") is not None else {"seed": RANDOM.getrandbits(63)}


def is_of_one(path: str, body: RequestBody) -> bool:
    """Whether the answer has one choice."""
    values = body.values
    if values.get("n") not in _ONE or values.get("best_of") not in _ONE or body.get("use_beam_search"):
        return False
    return path != "/v1/completions" or not is_batch(body.raw("prompt"))


def repeats_itself(body: RequestBody) -> bool:
    """Whether a second answer from another instance would be the same: greedy, or with a seed from the client."""
    if body.get("use_beam_search"):
        return False
    return body.values.get("temperature") == 0 or body.values.get("seed") is not None


def prefill_body(body: RequestBody, form: Form, seed: dict[str, int], kept: dict[str, Any] | None = None) -> bytes:
    """The body of the prefill leg: one token, not streamed, and the KV kept for another instance. `kept`: where P
    fetches the KV of earlier turns.

    SGLang's P generates one token whatever the request says, and expects the same request as D.
    """
    if form.meets_in_a_room:
        return body.encode(without=("stream_options",), **{**form.prefill_fields, "stream": False})
    fields: dict[str, Any] = {"max_tokens": 1, "n": 1, "stream": False, **seed, **form.prefill_fields}
    if "max_completion_tokens" in body:
        fields["max_completion_tokens"] = 1
    min_tokens = body.values.get("min_tokens")
    if isinstance(min_tokens, int):
        fields["min_tokens"] = min(min_tokens, 1)
    fields[HAND_OFF_FIELD] = {**form.produce, **kept, "transfer_id": form.transfer_id} if kept else form.produce
    return body.encode(without=("stream_options", "best_of", *form.prefill_without), **fields)


def decode_body(
    body: RequestBody, params: Any, seed: dict[str, int], form: Form, *, returns_ticket: bool, keeps: bool = False
) -> bytes:
    """The body of the decode leg, with a ticket: the client's own, with the seed that P's token was sampled with.

    Unless `returns_ticket`, D keeps KV for another turn only if the router removes its ticket from the answer
    (`keeps`), since the ticket has addresses that clients must not see.
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


class _Ticket(msgspec.Struct):
    remote_engine_id: str
    remote_host: str | None = None
    remote_port: int | None = None
    remote_ranks: list[RankAddress] | None = None
    remote_address_seal: str = ""
    remote_prefixes: Any = None
    """A key of kvferry's connectors only."""
    remote_stores: list[str] | None = None


_TICKET = msgspec.json.Decoder(_Ticket)


def about_ticket(params: msgspec.Raw) -> tuple[KVSource | None, bool]:
    """Where a ticket comes from, None if it does not say, and without a port if D cannot ask there before P has
    answered; and whether no store took its KV, so that D would have to compute the prompt."""
    try:
        ticket = _TICKET.decode(params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False
    port = (ticket.remote_port or 0) if ticket.remote_prefixes is not None else 0
    host, ranks, seal = ticket.remote_host or "", ticket.remote_ranks, ticket.remote_address_seal
    origin = KVSource(engine_id=ticket.remote_engine_id, host=host, port=port, ranks=ranks, seal=seal)
    return origin, ticket.remote_stores == []
