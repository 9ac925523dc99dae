"""The plans that the scheduler side of the P2P connector sends to its worker sides, and the metadata of a hand-off."""

from __future__ import annotations

import msgspec

from kvferry.core.messages.hand_off import PrefillResult, Ticket
from kvferry.core.messages.wire import decode_frame


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Announce the blocks `first_block, …` of a hand-off, layer by layer, when this step has passed each layer.
    `block_ids`: where these blocks are on this instance.

    Blocks from the prefix cache also wait for the layer, because another request of this step may compute or load them.
    `opens`: True for the first `Save` of a hand-off.
    """

    transfer_id: str
    opens: bool
    first_block: int
    block_ids: list[int]


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """The hand-off is complete. `meta`: an encoded `HandOffMeta`. The request's blocks are under `Hold`.

    With `kept_blocks`, the hand-off begins only now, consists of these blocks, and has a lease of `lease_s` seconds;
    all steps that computed the blocks have ended.
    """

    transfer_id: str
    request_id: str
    meta: bytes
    kept_blocks: list[int] = []
    lease_s: float | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fetch the KV of the first `num_tokens` tokens of a hand-off into `block_ids`, of which the first `skip_blocks`
    are already filled.

    `tokens`, `salt`: prompt and salt of the request. The hand-off is of the whole prompt or of a prefix of it; with
    `longer`, it may have further tokens.
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
    """The work of one step. It is done in the order of the fields: withdrawals come first, because their blocks may be
    in use again."""

    resets: list[str] = []
    """Transfer ids of hand-offs that begin again: all their announcements so far are void."""
    drops: dict[str, str] = {}
    """Hand-offs that will not be completed. By transfer id, the request whose blocks are under `Hold`, or an empty
    string if no block was announced. Consumers that wait for these hand-offs get an error."""
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
    """Tickets that this instance will not fetch, by request id. Their producers may free the blocks."""

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)

    def take(self) -> P2pPlan | None:
        """Return a copy of the plan, and empty this one. None: there is nothing to do."""
        if not self:
            return None
        plan, empty = msgspec.structs.replace(self), P2pPlan()
        for name in self.__struct_fields__:
            setattr(self, name, getattr(empty, name))
        return plan


class HandOffMeta(msgspec.Struct, frozen=True):
    """Metadata that the producer sends when it seals. Both sides tokenize the prompt, so the consumer compares
    `prefixes` (digests of the producer's tokens and their salt) to detect another prompt. `prefill_result`: None for
    blocks that are kept for the next turn."""

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
