"""The order in which the legs of a request are called: one after the other, or both at once.

Every form ends in an `Answer` for the client, good or bad as the instance gave it, or raises `RequestError` when no
instance gave any.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvferry.core.errors import PeerLost, TransferError
from kvferry.router.errors import Unreachable
from kvferry.router.exchange import Exchange
from kvferry.router.instance import Instance, InstanceFacts, Unasked, VllmFacts
from kvferry.router.legs import (
    MAX_PREFILL_ANSWER_BYTES,
    Prefilled,
    PrefillFailed,
    PrefillOutcome,
    Refused,
    Verdict,
    decode_body,
    prefill_body,
    ticket_origin,
    verdict,
    whole_body,
)
from kvferry.router.protocols.choose import choose_form
from kvferry.router.protocols.form import Form
from kvferry.router.upstream import Answer

_NOT_COMPRESSED = [(b"accept-encoding", b"identity")]
"""For answers that the router reads itself."""


async def split(exchange: Exchange, group: asyncio.TaskGroup) -> Answer:
    """Prefill on one instance, decode on another. A prefill instance that fails is replaced by another, and after
    that by D itself, which then does both."""
    for prefill in exchange.prefills():
        outcome = await _hand_off(exchange, prefill, group)
        if isinstance(outcome, Answer):
            return outcome
        if isinstance(outcome, Refused):
            return outcome.answer
        exchange.forgive_decodes()
    exchange.services.metrics.served("local")
    return await whole(exchange)


async def whole(exchange: Exchange) -> Answer:
    """Both phases on one decode instance."""
    return await _decode(exchange, whole_body(exchange.body))


async def _hand_off(
    exchange: Exchange, prefill: Instance, group: asyncio.TaskGroup
) -> Answer | Refused | PrefillFailed:
    decodes = [one.facts for one in exchange.services.pools.decode.instances if one.alive]
    transfer_id = exchange.open_ticket(prefill)
    form = choose_form(exchange.services.config, transfer_id, prefill, decodes)
    if form is None or not exchange.can_hand_off(prefill):
        exchange.settle_ticket(transfer_id)
        exchange.blame(prefill, "no_bootstrap" if form is None else "no_pair")
        return PrefillFailed("it cannot hand off now")
    if form.concurrent and form.early is not None:
        exchange.services.metrics.served("concurrent")
        return await _concurrent(exchange, prefill, form, form.early, group)
    exchange.services.metrics.served("sequential")
    return await _sequential(exchange, prefill, form)


async def _sequential(exchange: Exchange, prefill: Instance, form: Form) -> Answer | Refused | PrefillFailed:
    """P answers, then D is called with the ticket."""
    outcome = await _prefill(exchange, prefill, form)
    if not isinstance(outcome, Prefilled):
        return outcome
    return await _decode_with_ticket(exchange, prefill, outcome)


async def _concurrent(
    exchange: Exchange, prefill: Instance, form: Form, ticket: dict[str, Any], group: asyncio.TaskGroup
) -> Answer | Refused | PrefillFailed:
    """P and D are called at once; D asks P itself.

    D's answer may begin before P's; P's leg then goes on beside it. When D fails, or P is done first, P's outcome
    decides: without it there is nothing for D to wait for, and when it comes from another engine than D asks, D is
    called again with P's ticket.
    """
    early = decode_body(exchange.body, ticket, _seed(exchange, form))
    prefilling = exchange.start(group, _prefill(exchange, prefill, form))
    decoding = exchange.start(group, _decode_once(exchange, prefill, early, form.transfer_id))
    await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
    if decoding.done() and _is_final(exchange, decoding.result()):
        return _fetched(exchange, decoding.result(), form.transfer_id)
    outcome: PrefillOutcome = await prefilling
    if not isinstance(outcome, Prefilled) or outcome.params is None:
        decoding.cancel()
        await asyncio.wait({decoding})
        return _without_ticket(exchange, prefill, outcome)
    if not _asked_there(outcome, ticket):
        decoding.cancel()
        await asyncio.wait({decoding})
        exchange.forgive_decodes()
        return await _decode_with_ticket(exchange, prefill, outcome)
    answer: Answer | None = await decoding
    if _is_final(exchange, answer):
        return _fetched(exchange, answer, form.transfer_id)
    return await _decode_with_ticket(exchange, prefill, outcome, answer)


def _is_final(exchange: Exchange, answer: Answer | None) -> bool:
    """Whether D's leg is over for good, whatever P says: it served, or nobody else can and P is not to blame."""
    if answer is not None and verdict(answer.status) is Verdict.SERVED:
        return True
    if exchange.has_other_decode():
        return False
    if answer is None:
        return isinstance(exchange.decode_lost, Unreachable)
    return verdict(answer.status) is Verdict.BUSY


def _asked_there(outcome: Prefilled, early: dict[str, Any]) -> bool:
    """Whether P's ticket comes from where D was told to ask."""
    return outcome.origin is None or outcome.origin.engine_id == early["remote_engine_id"]


def _fetched(exchange: Exchange, answer: Answer | None, transfer_id: str) -> Answer:
    if answer is None:
        raise exchange.unavailable()
    exchange.fetching = transfer_id
    return answer


def _without_ticket(exchange: Exchange, prefill: Instance, outcome: PrefillOutcome) -> Refused | PrefillFailed:
    if not isinstance(outcome, Prefilled):
        return outcome
    exchange.blame(prefill, "no_ticket")
    return PrefillFailed("it keeps nothing for another instance")


# The legs.


def _seed(exchange: Exchange, form: Form) -> dict[str, int]:
    return exchange.seed if form.shares_seed else {}


async def _prefill(exchange: Exchange, prefill: Instance, form: Form) -> PrefillOutcome:
    body = prefill_body(exchange.body, form, _seed(exchange, form))
    try:
        answer = await exchange.call(prefill, body, _NOT_COMPRESSED + form.prefill_headers)
    except PeerLost as error:
        if isinstance(error, Unreachable):
            exchange.settle_ticket(form.transfer_id)
        return PrefillFailed(str(error))
    if verdict(answer.status) is not Verdict.SERVED:
        answer.close()
        return PrefillFailed(f"{prefill} answered {answer.status}")
    if answer.status >= 400:
        exchange.settle_ticket(form.transfer_id)
        return Refused(answer)
    return await _read_ticket(exchange, answer, form)


async def _read_ticket(exchange: Exchange, answer: Answer, form: Form) -> Prefilled | PrefillFailed:
    prefill = answer.instance
    try:
        params = form.read_ticket(await answer.read(MAX_PREFILL_ANSWER_BYTES))
    except (TransferError, msgspec.MsgspecError) as error:
        answer.close()
        exchange.blame(prefill, "broken_answer")
        return PrefillFailed(f"{prefill} gave no whole answer: {error}")
    if params is None:
        exchange.settle_ticket(form.transfer_id)
        return Prefilled(form, None, None)
    exchange.note_ticket(form.transfer_id, params)
    origin = ticket_origin(params)
    if isinstance(prefill.facts, InstanceFacts) and (origin is None or origin.engine_id != prefill.facts.engine_id):
        prefill.facts = Unasked()  # Another process is at this address now; `Health` asks it.
    elif isinstance(prefill.facts, VllmFacts) and origin is not None and origin.port:
        prefill.facts = prefill.facts.with_origin(origin)
    return Prefilled(form, params, origin)


async def _decode_once(exchange: Exchange, prefill: Instance, body: bytes, transfer_id: str) -> Answer | None:
    """One decode instance's answer, good or bad; None when it broke off or could not be reached."""
    for instance in exchange.decodes(prefill):
        return await exchange.call_decode(instance, body, transfer_id)
    return None


async def _decode_with_ticket(
    exchange: Exchange, prefill: Instance, outcome: Prefilled, last: Answer | None = None
) -> Answer:
    if outcome.params is None:
        return await _decode(exchange, whole_body(exchange.body))
    form = outcome.form
    exchange.fetching = form.transfer_id
    body = decode_body(exchange.body, outcome.params, _seed(exchange, form))
    answer = await _decode(exchange, body, last, prefill)
    if verdict(answer.status) is Verdict.FAULT and isinstance(prefill.facts, VllmFacts):
        prefill.facts = Unasked()  # Another process may be at its address now; `Health` asks it.
    return answer


async def _decode(
    exchange: Exchange, body: bytes, last: Answer | None = None, prefill: Instance | None = None
) -> Answer:
    """The first decode instance that serves; else the last bad answer, so that the client sees what was wrong.

    With a ticket in the body, `prefill` is whose. `last` is an answer that another instance gave before. Raises
    `Unavailable` or `InstanceLost` when there is none.
    """
    for instance in exchange.decodes(prefill):
        answer = await exchange.call_decode(instance, body, exchange.fetching if prefill is not None else None)
        if answer is None:
            continue
        if verdict(answer.status) is Verdict.SERVED:
            return answer
        if last is not None:
            last.close()
        last = answer
    if last is None:
        raise exchange.unavailable()
    return last
