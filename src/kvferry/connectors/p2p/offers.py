"""The hand-offs that this instance makes: which blocks are announced, and until when they stay. No tensors.

Owns the list of hand-offs in the making or under lease here. It does not know whether anybody fetches one, or how:
the worker sides report when blocks are free again.

A block is announced once, when its last token is scheduled: when it is full, or when the prompt ends in it. When a step
computes tokens again whose blocks were announced, as after a load that failed, all that was announced of that hand-off
is void, and it begins anew: its own request's tokens, or those of another that shares its blocks.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connectors.api import (
    ConnectorContext,
    Finish,
    HasAnswer,
    Hold,
    Match,
    Miss,
    Pending,
    Release,
    RequestView,
    ScheduledChunk,
)
from kvferry.connectors.p2p.options import P2pOptions
from kvferry.connectors.p2p.plan import HandOffMeta, P2pPlan, Save, Seal, encode_meta
from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.core.hand_off import Produce, Ticket, prefix_digests
from kvferry.core.ticket_seal import TicketSealer

QUEUED_S = 600.0
"""How much older than its lease a ticket may be when D is asked with it: a router may have kept it in a queue, and the
first token is right for as long as there is one."""
NUM_PREFIXES = 16
"""Digests in the ticket of kept blocks, so that a next turn that differs late still finds most of them."""


@dataclass(eq=False)
class _Offer:
    """A hand-off, from its first chunk until its blocks are free again. `announced`: its blocks that are, in order,
    while its request runs."""

    request_id: str
    transfer_id: str
    num_blocks: int
    announced: list[int] = field(default_factory=list)
    opened: bool = False


class Offers:
    """The hand-offs that this engine offers as P: what is announced of each request, and which blocks are held for
    it."""

    def __init__(self, context: ConnectorContext, work: P2pPlan, sealer: TicketSealer, settings: P2pOptions) -> None:
        self._config, self._layout = context.config, context.layout
        self._work, self._sealer = work, sealer
        self._lease_s, self._kept_lease_s = settings.lease_s, settings.decoder_kv_blocks_ttl
        self._addresses: list[tuple[str, int]] = []
        self._offers: dict[str, _Offer] = {}
        self._by_transfer: dict[str, _Offer] = {}
        self._announced_by: defaultdict[int, set[_Offer]] = defaultdict(set)
        self._admitted: dict[str, int] = {}
        """How many blocks they will hold, of requests that were let in, until their first chunk or their end: meanwhile
        they may wait for blocks, or for another connector that loads for them."""

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Where this instance's ranks listen."""
        self._addresses = [(address["host"], address["port"]) for address in addresses]

    def address_seal(self) -> str:
        """Of this engine and its addresses."""
        return self._sealer.address_seal(self._address()) if self._addresses else ""

    # Admission.

    def match(self, request: RequestView, hand_off: Produce) -> Match:
        """A prefill for another waits while too much is held already."""
        if not self._config.produces:
            return Miss(ConfigError("this instance has kv_role kv_consumer: it hands nothing off"))
        other = self._by_transfer.get(hand_off.transfer_id)
        if other is not None and other.request_id != request.request_id:
            return Miss(ProtocolError(f"transfer_id {hand_off.transfer_id!r} is in use by another request"))
        if other is not None:
            return Miss()  # it was preempted, and counts already
        num_blocks = self._num_blocks(len(request.prompt_token_ids))
        if not self._has_room(num_blocks, request.request_id):
            return Pending()
        self._admitted[request.request_id] = num_blocks
        return Miss()

    def _has_room(self, num_blocks: int, request_id: str) -> bool:
        held = sum(offer.num_blocks for offer in self._offers.values())
        held += sum(blocks for name, blocks in self._admitted.items() if name != request_id)
        return not held or (held + num_blocks) * self._layout.block_bytes <= self._config.kv_buffer_size

    # Steps.

    def restart(self, request: RequestView) -> None:
        """A preempted request begins again, in other blocks."""
        offer = self._offers.get(request.request_id)
        if offer is not None:
            self._begin_anew(offer)

    def void(self, chunks: Sequence[ScheduledChunk]) -> None:
        """What this step computes was not there before. Called with all chunks of a step, before `announce`."""
        for chunk in chunks if self._announced_by else ():
            if chunk.num_tokens and chunk.start < len(chunk.request.prompt_token_ids):  # an answer's blocks are its own
                first, end = chunk.start // self._layout.block_size, self._num_blocks(chunk.start + chunk.num_tokens)
                for block_id in chunk.block_ids[first:end]:
                    for offer in list(self._announced_by.get(block_id, ())):
                        self._begin_anew(offer)

    def _begin_anew(self, offer: _Offer) -> None:
        self._work.resets.append(offer.transfer_id)
        self._forget_announced(offer)

    def _forget_announced(self, offer: _Offer) -> None:
        for block_id in offer.announced:
            self._announced_by[block_id].discard(offer)
            if not self._announced_by[block_id]:
                del self._announced_by[block_id]
        offer.announced = []

    def expect(self, request: RequestView, hand_off: Produce) -> None:
        """A prefill has its blocks, but loads what an earlier turn left elsewhere before it computes."""
        self._track(request, hand_off.transfer_id)

    def announce(self, chunk: ScheduledChunk) -> None:
        """The blocks that are complete once this step is over."""
        request = chunk.request
        if not isinstance(request.hand_off, Produce) or not self._config.produces:
            return
        offer = self._track(request, request.hand_off.transfer_id)
        if offer is None:
            return
        block_size, num_prompt = self._layout.block_size, len(request.prompt_token_ids)
        end = chunk.start + chunk.num_tokens
        first = len(offer.announced)
        last = offer.num_blocks if end >= num_prompt else end // block_size
        if first >= last and offer.opened:
            return
        block_ids = list(chunk.block_ids[first:last])
        self._work.saves.append(Save(offer.transfer_id, not offer.opened, first, block_ids))
        offer.opened = True
        offer.announced += block_ids
        for block_id in block_ids:
            self._announced_by[block_id].add(offer)

    def _track(self, request: RequestView, transfer_id: str) -> _Offer | None:
        """The record of this request's hand-off; None when another request has that transfer id."""
        self._admitted.pop(request.request_id, None)
        offer = self._by_transfer.get(transfer_id)
        if offer is None:
            offer = _Offer(request.request_id, transfer_id, self._num_blocks(len(request.prompt_token_ids)))
            self._offers[request.request_id] = self._by_transfer[transfer_id] = offer
        return offer if offer.request_id == request.request_id else None

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks that were announced stay until the worker sides say so."""
        offer = self._offers.get(request.request_id)
        if offer is not None:
            self._take_back(offer)
        if offer is None or not offer.opened:
            self.never_opened(request)
            return Release()
        result, transfer_id = request.prefill_result, offer.transfer_id
        if result is None or len(offer.announced) != offer.num_blocks:
            self._forget_announced(offer)
            self._work.drops[transfer_id] = request.request_id
            return Hold(None)
        num_tokens = len(request.prompt_token_ids)
        meta = HandOffMeta(num_tokens, prefix_digests(request.prompt_token_ids, [num_tokens]), result)
        ticket = self._ticket(transfer_id, request.request_id, block_ids[: offer.num_blocks], meta)
        params = self._sealer.seal(ticket, self._lease_s + QUEUED_S).to_params()
        self._forget_announced(offer)
        self._work.seals.append(Seal(transfer_id, request.request_id, encode_meta(meta)))
        return Hold(params)

    def _take_back(self, offer: _Offer) -> None:
        """What no plan has carried, because making one failed: a later step would announce what is not there."""
        unsent = [save for save in self._work.saves if save.transfer_id == offer.transfer_id]
        if unsent:
            self._work.saves = [save for save in self._work.saves if save.transfer_id != offer.transfer_id]
            offer.opened = offer.opened and not any(save.opens for save in unsent)

    def never_opened(self, request: RequestView) -> None:
        """It ended before anything was announced. A consumer may wait for it all the same, and is told; not where
        another request makes a hand-off of that name."""
        self.released(request.request_id)
        if isinstance(request.hand_off, Produce):
            self.refused(request.hand_off.transfer_id)

    def refused(self, transfer_id: str) -> None:
        """The same of a request that was never admitted."""
        if self._config.produces and transfer_id not in self._by_transfer:
            self._work.drops.setdefault(transfer_id, "")

    def keep(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Keep what a decode has computed for the prefill of the next turn, where there is an answer and room."""
        if not isinstance(request, HasAnswer) or request.finish_reason not in ("stop", "length"):
            return Release()
        num_tokens = min(request.num_computed_tokens, len(request.tokens))
        num_blocks = self._num_blocks(num_tokens)
        if not num_blocks or not self._config.produces or not self._has_room(num_blocks, request.request_id):
            return Release()
        transfer_id = f"kept-{secrets.token_hex(12)}"
        offer = _Offer(request.request_id, transfer_id, num_blocks, opened=True)
        self._offers[request.request_id] = self._by_transfer[transfer_id] = offer
        ours = list(block_ids[:num_blocks])
        prefixes = prefix_digests(request.tokens, _checkpoints(num_tokens, len(request.prompt_token_ids)))
        meta = HandOffMeta(num_tokens, prefixes, None)
        self._work.seals.append(Seal(transfer_id, request.request_id, encode_meta(meta), ours, self._kept_lease_s))
        ticket = self._ticket(transfer_id, request.request_id, ours, meta)
        params = self._sealer.seal(ticket, self._kept_lease_s).to_params() | {
            "do_remote_prefill": False,
            "do_remote_decode": True,
        }
        return Hold(params | {"remote_transfer_id": params.pop("transfer_id")})

    def _ticket(self, transfer_id: str, request_id: str, block_ids: Sequence[int], meta: HandOffMeta) -> Ticket:
        return msgspec.structs.replace(
            self._address(),
            transfer_id=transfer_id,
            remote_request_id=request_id,
            remote_block_ids=[list(block_ids)],
            remote_num_tokens=meta.num_tokens,
            remote_prefixes=meta.prefixes,
            prefill_result=meta.prefill_result,
        )

    def _address(self) -> Ticket:
        """A ticket that only says where the KV is."""
        host, port = self._addresses[0]
        return Ticket(
            transfer_id="",
            remote_engine_id=self._config.engine_id,
            remote_host=host,
            remote_port=port,
            tp_size=self._layout.tp_size,
            remote_ranks=self._addresses if len(self._addresses) > 1 else None,
        )

    def released(self, request_id: str) -> None:
        """The blocks of a hand-off are free again, or it was never begun."""
        self._admitted.pop(request_id, None)
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._forget_announced(offer)
            del self._by_transfer[offer.transfer_id]

    def end(self, transfer_id: str) -> bool:
        """The consumer will never come. True when the hand-off has begun; else it ends when it does."""
        self._work.ends.append(transfer_id)
        return transfer_id in self._by_transfer

    # Insight.

    @property
    def admitted(self) -> list[str]:
        """Requests that count, and have not begun."""
        return list(self._admitted)

    @property
    def names(self) -> list[str]:
        """Requests whose blocks are held, or will be."""
        return list(self._offers)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._layout.block_size)


def _checkpoints(num_tokens: int, num_prompt_tokens: int) -> list[int]:
    """Lengths of prefixes worth knowing: all, the prompt, and some between."""
    step = -(-num_tokens // NUM_PREFIXES)
    return sorted({*range(step, num_tokens, step), min(num_prompt_tokens, num_tokens), num_tokens})
