"""What the scheduler side of the P2P connector asks of its worker sides, and what travels with a hand-off."""

from __future__ import annotations

import msgspec

from kvferry.core.hand_off import PrefillResult, Ticket


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Announce blocks `first_block, …` of a hand-off, which are `block_ids` here, as this step passes each layer.

    So also those that the prefix cache had: another request of the same step may be the one that computes them, or a
    load of this step that brings them. `opens`: it is the hand-off's first.
    """

    transfer_id: str
    opens: bool
    first_block: int
    block_ids: list[int]


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """The hand-off is complete; `meta` is an encoded `HandOffMeta`. The request's blocks are under `Hold`.

    `kept_blocks`: it begins only now, with these, and its lease is of `lease_s`: the request is over, and so are all
    steps that computed its blocks.
    """

    transfer_id: str
    request_id: str
    meta: bytes
    kept_blocks: list[int] = []
    lease_s: float | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fetch the first `num_tokens` tokens of a hand-off into `block_ids`, the first `skip_blocks` of which are filled.

    `tokens` are the request's prompt. The hand-off is of all of them or of a prefix; with `longer`, of other tokens
    too, behind those that are wanted.
    """

    request_id: str
    ticket: Ticket
    block_ids: list[int]
    skip_blocks: int
    num_tokens: int
    tokens: list[int]
    longer: bool = False


class P2pPlan(msgspec.Struct):
    """One step's work: the scheduler side puts it together, and takes it once a step.

    It is done in this order: what is withdrawn comes first, since its blocks may be in use again.
    """

    resets: list[str] = []
    """Hand-offs whose blocks are computed again: all that was announced of them is void."""
    drops: dict[str, str] = {}
    """Hand-offs that will not be complete, by transfer id: the request whose blocks are under `Hold`, or "" where
    nothing was announced. Consumers may wait for them."""
    ends: list[str] = []
    """Leases to end early, by transfer id."""
    saves: list[Save] = []
    seals: list[Seal] = []
    cancels: list[str] = []
    """Requests whose load must stop."""
    waits: dict[str, Ticket] = {}
    """Tickets that requests wait here to fetch: keep their leases alive."""
    loads: dict[str, Load] = {}
    """By request id."""
    unwanted: dict[str, Ticket] = {}
    """Tickets that nobody here will fetch: their producers are told."""

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)

    def take(self) -> P2pPlan | None:
        """What has come together so far, which is not changed any more, and begin anew; None when there is nothing."""
        if not self:
            return None
        taken, empty = msgspec.structs.replace(self), P2pPlan()
        for name in self.__struct_fields__:
            setattr(self, name, getattr(empty, name))
        return taken


class HandOffMeta(msgspec.Struct, frozen=True):
    """What the producer says when it seals. `prefixes`: digests of its tokens, so that nobody uses the KV of others,
    which a difference in tokenizer or chat template would bring. `prefill_result`: None of blocks that are kept for
    another turn.
    """

    num_tokens: int
    prefixes: list[tuple[int, str]]
    prefill_result: PrefillResult | None


def encode_meta(meta: HandOffMeta) -> bytes:
    """For `Seal.meta`."""
    return msgspec.msgpack.encode(meta)


def decode_meta(encoded: bytes) -> HandOffMeta:
    """The other way. Raises `msgspec.DecodeError` on what no honest producer sends."""
    try:
        return msgspec.msgpack.decode(encoded, type=HandOffMeta)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
