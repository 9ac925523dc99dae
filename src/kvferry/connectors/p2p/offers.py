"""The hand-offs that this instance makes: their announced blocks and their leases. No tensors.

Owns the hand-offs that are being made or are under lease. Does not know about fetches: the worker sides report when the
blocks of a hand-off are free again.

A block is announced once, when its last token is scheduled: when it is full, or when the prompt ends in it. If a step
computes tokens again whose blocks were announced, as after a load that failed, all announcements of this hand-off are
void, and it begins again. This is also so if the step computes the tokens for another request that shares the
blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connectors.api import (
    ConnectorContext,
    Finish,
    Hold,
    Match,
    Miss,
    Pending,
    Release,
    RequestView,
    ScheduledChunk,
)
from kvferry.connectors.p2p.plan import HandOffMeta, P2pPlan, Save, Seal, encode_meta
from kvferry.core import entropy
from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.core.messages.hand_off import Produce, Ticket, prefix_digests
from kvferry.core.messages.ticket_seal import TicketSealer
from kvferry.core.ordered_set import OrderedSet
from kvferry.transport.options import TransportOptions

NUM_PREFIXES = 16
"""Number of digests in the ticket of blocks that are kept for a next turn, so that a next turn that differs near the
end can still use most of these blocks."""


@dataclass(eq=False)
class _Offer:
    """A hand-off, from its first chunk until its blocks are free again. `announced`: its announced blocks, in order,
    while its request runs. `is_retained`: True if it is kept for a next turn, which may never come. `is_ending`: True
    if it ends with the next plan."""

    request_id: str
    transfer_id: str
    num_blocks: int
    announced: list[int] = field(default_factory=list)
    is_opened: bool = False
    is_retained: bool = False
    is_ending: bool = False


class Offers:
    """Adds announcements and ends of hand-offs to `work`, the next plan, and seals the tickets."""

    queued_s = 600.0
    """Seconds after the end of its lease for which a ticket is accepted: it may have waited in a router's queue, and
    its first token is right even if the KV is gone."""

    def __init__(
        self, context: ConnectorContext, work: P2pPlan, sealer: TicketSealer, settings: TransportOptions
    ) -> None:
        self._config, self._layout = context.config, context.layout
        self._work, self._sealer = work, sealer
        self._lease_s, self._kept_lease_s = settings.lease_s, settings.decoder_kv_blocks_ttl
        self._addresses: list[tuple[str, int]] = []
        self._offers: dict[str, _Offer] = {}
        self._by_transfer: dict[str, _Offer] = {}
        self._announced_by: defaultdict[int, OrderedSet[_Offer]] = defaultdict(OrderedSet)
        self._admitted: dict[str, int] = {}
        """By request id, the number of blocks of prefills that `match` has admitted and that have had no chunk yet,
        because they wait for blocks, or for another connector's load."""

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Set the addresses at which this instance's ranks listen."""
        self._addresses = [(address["host"], address["port"]) for address in addresses]

    def address_seal(self) -> str:
        """The seal of this engine's id and addresses; empty before the addresses are known."""
        return self._sealer.address_seal(self._address()) if self._addresses else ""

    # Admission.

    def match(self, request: RequestView, hand_off: Produce) -> Match:
        """A prefill for another instance waits (`Pending`) while `kv_buffer_size` bytes are held or promised. To make
        room for it, hand-offs that are kept for next turns are ended."""
        if not self._config.produces:
            return Miss(
                ConfigError("this instance has kv_role kv_consumer and cannot hand off; use kv_producer or kv_both")
            )
        other = self._by_transfer.get(hand_off.transfer_id)
        if other is not None and other.request_id != request.request_id:
            return Miss(ProtocolError(f"transfer_id {hand_off.transfer_id!r} is in use by another request"))
        if other is not None:
            return Miss()  # preempted: the request is counted already
        num_blocks = self._num_blocks(len(request.prompt_token_ids))
        if not self._has_room(num_blocks, request.request_id):
            self.make_room(num_blocks)
            return Pending()
        self._admitted[request.request_id] = num_blocks
        return Miss()

    def _has_room(self, num_blocks: int, request_id: str) -> bool:
        held = sum(offer.num_blocks for offer in self._offers.values())
        held += sum(blocks for name, blocks in self._admitted.items() if name != request_id)
        return not held or (held + num_blocks) * self._layout.block_bytes <= self._config.kv_buffer_size

    # Steps.

    def restart(self, request: RequestView) -> None:
        """Withdraw the announcements of a preempted request, which begins again in other blocks."""
        offer = self._offers.get(request.request_id)
        if offer is not None:
            self._void(offer)

    def void(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Withdraw the announcements of blocks that this step computes again. Called with all chunks of a step, before
        `announce`."""
        for chunk in chunks if self._announced_by else ():
            if chunk.num_tokens and chunk.start < len(
                chunk.request.prompt_token_ids
            ):  # no other request shares the blocks of an answer
                first, end = chunk.start // self._layout.block_size, self._num_blocks(chunk.start + chunk.num_tokens)
                for block_id in chunk.block_ids[first:end]:
                    for offer in list(self._announced_by.get(block_id, ())):
                        self._void(offer)

    def _void(self, offer: _Offer) -> None:
        self._work.resets.append(offer.transfer_id)
        self._forget_announced(offer)

    def _forget_announced(self, offer: _Offer) -> None:
        for block_id in offer.announced:
            self._announced_by[block_id].discard(offer)
            if not self._announced_by[block_id]:
                del self._announced_by[block_id]
        offer.announced = []

    def expect(self, request: RequestView, hand_off: Produce) -> None:
        """Record a prefill that has its blocks, but first loads the KV of an earlier turn from another instance."""
        self._track(request, hand_off.transfer_id)

    def announce(self, chunk: ScheduledChunk) -> None:
        """Announce the blocks that this chunk completes."""
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
        if first >= last and offer.is_opened:
            return
        block_ids = list(chunk.block_ids[first:last])
        self._work.saves.append(Save(offer.transfer_id, not offer.is_opened, first, block_ids))
        offer.is_opened = True
        offer.announced += block_ids
        for block_id in block_ids:
            self._announced_by[block_id].add(offer)

    def _track(self, request: RequestView, transfer_id: str) -> _Offer | None:
        """The record of this request's hand-off; None: another request has the transfer id."""
        self._admitted.pop(request.request_id, None)
        offer = self._by_transfer.get(transfer_id)
        if offer is None:
            offer = _Offer(request.request_id, transfer_id, self._num_blocks(len(request.prompt_token_ids)))
            self._offers[request.request_id] = self._by_transfer[transfer_id] = offer
        return offer if offer.request_id == request.request_id else None

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Announced blocks stay under `Hold`. If the prefill is complete, the hand-off is sealed and gets a ticket;
        otherwise it is dropped."""
        offer = self._offers.get(request.request_id)
        if offer is not None:
            self._withdraw_unsent(offer)
        if offer is None or not offer.is_opened:
            self.end_unopened(request)
            return Release()
        result, transfer_id = request.prefill_result, offer.transfer_id
        if result is None or len(offer.announced) != offer.num_blocks:
            self._forget_announced(offer)
            self._work.drops[transfer_id] = request.request_id
            return Hold(None)
        num_tokens = len(request.prompt_token_ids)
        digests = prefix_digests(request.prompt_token_ids, [num_tokens], request.salt)
        meta = HandOffMeta(num_tokens, digests, result)
        ticket = self._ticket(transfer_id, request.request_id, block_ids[: offer.num_blocks], meta)
        params = self._sealer.seal(ticket, self._lease_s + self.queued_s).to_params()
        self._forget_announced(offer)
        self._work.seals.append(Seal(transfer_id, request.request_id, encode_meta(meta)))
        return Hold(params)

    def _withdraw_unsent(self, offer: _Offer) -> None:
        """Remove announcements that were not sent because making the plan failed. Otherwise, a later step would
        announce blocks that were never written."""
        unsent = [save for save in self._work.saves if save.transfer_id == offer.transfer_id]
        if unsent:
            self._work.saves = [save for save in self._work.saves if save.transfer_id != offer.transfer_id]
            offer.is_opened = offer.is_opened and not any(save.opens for save in unsent)

    def end_unopened(self, request: RequestView) -> None:
        """End a request of which no block was announced. A consumer that waits for the hand-off gets an error."""
        self.released(request.request_id)
        if isinstance(request.hand_off, Produce):
            self.refused(request.hand_off.transfer_id)

    def refused(self, transfer_id: str) -> None:
        """Report to consumers that this hand-off will not come, unless another request makes a hand-off with the same
        id."""
        if self._config.produces and transfer_id not in self._by_transfer:
            self._work.drops.setdefault(transfer_id, "")

    def keep(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Hold the blocks of a finished answer for the prefill of the next turn, if `kv_buffer_size` has room."""
        if request.finish_reason not in ("stop", "length"):
            return Release()
        num_tokens = min(request.num_computed_tokens, len(request.tokens))
        num_blocks = self._num_blocks(num_tokens)
        if not num_blocks or not self._config.produces or not self._has_room(num_blocks, request.request_id):
            return Release()
        transfer_id = f"kept-{entropy.token_hex(12)}"
        offer = _Offer(request.request_id, transfer_id, num_blocks, is_opened=True, is_retained=True)
        self._offers[request.request_id] = self._by_transfer[transfer_id] = offer
        retained_ids = list(block_ids[:num_blocks])
        lengths = _checkpoints(num_tokens, len(request.prompt_token_ids))
        prefixes = prefix_digests(request.tokens, lengths, request.salt)
        meta = HandOffMeta(num_tokens, prefixes, None)
        self._work.seals.append(
            Seal(transfer_id, request.request_id, encode_meta(meta), retained_ids, self._kept_lease_s)
        )
        ticket = self._ticket(transfer_id, request.request_id, retained_ids, meta)
        params = self._sealer.seal(ticket, self._kept_lease_s).to_params() | {
            "do_remote_prefill": False,
            "do_remote_decode": True,
        }
        return Hold(params | {"remote_transfer_id": params.pop("transfer_id")})

    def make_room(self, num_blocks: int) -> None:
        """End hand-offs that are kept for next turns, the oldest first, until `num_blocks` blocks are about to become
        free."""
        for offer in self._offers.values():
            if num_blocks <= 0:
                return
            if offer.is_retained:
                num_blocks -= offer.num_blocks
                if not offer.is_ending:
                    offer.is_ending = True
                    self._work.ends.append(offer.transfer_id)

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
        """A ticket with only the fields of this engine's address."""
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
        """Forget a hand-off whose blocks are free again, or which never began."""
        self._admitted.pop(request_id, None)
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._forget_announced(offer)
            del self._by_transfer[offer.transfer_id]

    def end(self, transfer_id: str) -> bool:
        """End a hand-off that will not be fetched. True: it has begun. False: the worker sides end it when it
        begins."""
        self._work.ends.append(transfer_id)
        return transfer_id in self._by_transfer

    # Statistics and checks.

    @property
    def admitted(self) -> list[str]:
        """Number of requests that were admitted and have had no chunk yet."""
        return list(self._admitted)

    @property
    def names(self) -> list[str]:
        """Number of requests with a hand-off that is being made or is under lease."""
        return list(self._offers)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._layout.block_size)


def _checkpoints(num_tokens: int, num_prompt_tokens: int) -> list[int]:
    """Lengths of the prefixes whose digests go into a ticket: of all tokens, of the prompt, and of some between
    these."""
    step = -(-num_tokens // NUM_PREFIXES)
    return sorted({*range(step, num_tokens, step), min(num_prompt_tokens, num_tokens), num_tokens})
