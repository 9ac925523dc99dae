"""The plans that the scheduler side of the P2P connector sends to its worker sides, and the metadata of a hand-off."""

from __future__ import annotations

import msgspec

from kvferry.core.messages.hand_off import PrefillResult, Ticket
from kvferry.core.messages.wire import decode_frame


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Announce blocks `first_block, …` of a hand-off, here `block_ids`, as this step passes each layer.

    Blocks from the prefix cache also wait for the layer: another request of this step may compute or load them.
    `opens`: this is the hand-off's first `Save`.
    """

    transfer_id: str
    opens: bool
    first_block: int
    block_ids: list[int]


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """The hand-off is complete; `meta` is an encoded `HandOffMeta`. The request's blocks are under `Hold`.

    With `kept_blocks`, the hand-off begins only now, consists of these blocks, and has a lease of `lease_s`. All steps
    that computed them are over.
    """

    transfer_id: str
    request_id: str
    meta: bytes
    kept_blocks: list[int] = []
    lease_s: float | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fetch the first `num_tokens` tokens of a hand-off into `block_ids`, the first `skip_blocks` of which are filled.

    `tokens` and `salt` are the request's prompt. The hand-off is of all of them or of a prefix. With `longer`, other
    tokens may follow the wanted ones.
    """

    request_id: str
    ticket: Ticket
    block_ids: list[int]
    skip_blocks: int
    num_tokens: int
    tokens: list[int]
    salt: str = ""
    longer: bool = False


class P2pPlan(msgspec.Struct):
    """One step's work, carried out in the order of the fields: withdrawals first, since their blocks may be in use
    again."""

    resets: list[str] = []
    """Transfer ids of hand-offs that begin again: everything announced of them so far is void."""
    drops: dict[str, str] = {}
    """Hand-offs that will not be completed, by transfer id: the request whose blocks are under `Hold`, or "" if nothing
    was announced. Consumers that wait for them get this as an error."""
    ends: list[str] = []
    """Transfer ids of hand-offs that will not be fetched: their leases end early."""
    saves: list[Save] = []
    seals: list[Seal] = []
    cancels: list[str] = []
    """Requests whose loads must stop."""
    waits: dict[str, Ticket] = {}
    """Tickets of queued requests, by request id: their leases are renewed."""
    loads: dict[str, Load] = {}
    """Loads to begin, by request id."""
    unwanted: dict[str, Ticket] = {}
    """Tickets that this instance will not fetch, by request id: their producers may free the blocks."""

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)

    def take(self) -> P2pPlan | None:
        """The plan so far, as a copy, after which this one is empty; None if there is nothing to do."""
        if not self:
            return None
        taken, empty = msgspec.structs.replace(self), P2pPlan()
        for name in self.__struct_fields__:
            setattr(self, name, getattr(empty, name))
        return taken


class HandOffMeta(msgspec.Struct, frozen=True):
    """Metadata of the producer's tokens, sent when it seals. Both sides tokenize, so `prefixes` (digests of its tokens
    and their salt) let the consumer detect another prompt. `prefill_result` is None for blocks that are kept for the
    next turn."""

    num_tokens: int
    prefixes: list[tuple[int, str]]
    prefill_result: PrefillResult | None


def encode_meta(meta: HandOffMeta) -> bytes:
    """Encode the content of `Seal.meta`."""
    return msgspec.msgpack.encode(meta)


def decode_meta(encoded: bytes) -> HandOffMeta:
    """Decode the content of `Seal.meta`. Raises `ProtocolError` if this is not an encoded `HandOffMeta`."""
    meta: HandOffMeta = decode_frame(encoded, HandOffMeta)
    return meta
