"""The report of a kvferry instance at GET /kvferry/instance: the engine's server writes it, routers read it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ProtocolError
from kvferry.core.messages.hand_off import RankAddress
from kvferry.core.peer_message import PeerMessage


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """The source from which D fetches a hand-off of one of kvferry's connectors: an engine, and the addresses of its
    ranks (`ranks` None: one rank)."""

    engine_id: str
    host: str
    port: int
    ranks: list[RankAddress] | None = None
    seal: str = ""
    """The engine's seal of all fields: D connects to no address without it."""


Port = Annotated[int, Meta(ge=0, le=65535)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


class EventsAddress(PeerMessage, frozen=True, kw_only=True):
    """The endpoints at which an instance publishes its KV events, and replays them."""

    endpoint: str
    replay_endpoint: str | None = None

    def reachable_at(self, host: str) -> EventsAddress:
        """The address with the instance's own host, if it listens on all interfaces."""
        return EventsAddress(
            endpoint=_at_host(self.endpoint, host),
            replay_endpoint=self.replay_endpoint and _at_host(self.replay_endpoint, host),
        )


def _at_host(endpoint: str, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return endpoint.replace("//0.0.0.0:", f"//{name}:").replace("//[::]:", f"//{name}:")


class TicketKinds(PeerMessage, frozen=True, kw_only=True):
    """The kinds of tickets that a connector writes for D, and those with which it finds KV as D. None: not
    known, as with connectors of other packages that do not name them."""

    writes: tuple[str, ...] | None = None
    reads: tuple[str, ...] | None = None

    def within(self, *, produces: bool, consumes: bool) -> TicketKinds:
        """The kinds that a `kv_role` permits."""
        return TicketKinds(writes=self.writes if produces else (), reads=self.reads if consumes else ())

    def is_readable_by(self, other: TicketKinds) -> bool:
        """True if D, whose kinds are `other`, reads a kind that this instance writes, as far as both are known."""
        return self.writes is None or other.reads is None or not set(self.writes).isdisjoint(other.reads)


class InstanceFacts(PeerMessage, frozen=True, kw_only=True):
    """`kv_host`, `kv_port`: the control address of rank 0, empty and 0 if it has none; `kv_ranks`: the addresses of all
    its ranks, if there are several; `kv_seal`: for tickets that a router makes of these addresses."""

    stack: Literal["kvferry", "dynamo"] = "kvferry"
    """The stack whose engine computes."""
    role: Literal["prefill", "decode", "both"] = "both"
    engine_id: str = ""
    process: str = ""
    """Names this process: a user may have given the same `engine_id` to its successor."""
    connector: str | None = None
    """None: it can neither hand off nor fetch."""
    tickets: TicketKinds = TicketKinds()
    keeps_keys: bool = False
    """True if the instance stores and loads KV under keys of requests (`kvcache_store_keys`)."""
    structured_outputs: bool = False
    """True if the instance can constrain answers (`response_format`, `structured_outputs`)."""
    stores_take_kv: bool = True
    """False: it hands off through stores, and they accept no writes now."""
    kv_host: str = ""
    kv_port: Port = 0
    kv_ranks: list[RankAddress] | None = None
    kv_seal: str = ""
    tp_size: Annotated[int, Meta(ge=1, le=2**20)] = 1
    layout: str | None = None
    kv_layout: KVLayout | None = None
    """The layout whose fingerprint is `layout`."""
    num_kv_tokens: Number = 0
    """Capacity of its KV cache in tokens; 0: not reported."""
    block_size: Number = 0
    kv_events: EventsAddress | None = None
    max_model_len: Number = 0
    max_num_seqs: Number = 0
    """Max number of requests that it runs at a time; 0: not reported."""
    model_names: list[str] = msgspec.field(default_factory=list)

    def can_serve_as(self, part: Literal["prefill", "decode"]) -> bool:
        """True if the instance can take this role in a hand-off: it has a connector that hands off, and was not started
        for the other role."""
        kinds = self.tickets.writes if part == "prefill" else self.tickets.reads
        return self.connector is not None and kinds != () and self.role in ("both", part)

    def source(self, host: str) -> KVSource | None:
        """The source of its hand-offs; None if it has no control address. `host` is the instance's own, used if it
        reports none."""
        if not self.kv_port:
            return None
        return KVSource(
            engine_id=self.engine_id,
            host=self.kv_host or host,
            port=self.kv_port,
            ranks=self.kv_ranks,
            seal=self.kv_seal,
        )


def read_facts(content: bytes) -> InstanceFacts:
    """Decode an instance's answer. Raises `ProtocolError` if it is none, or lacks a name."""
    try:
        facts = msgspec.json.decode(content, type=InstanceFacts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"its report at /kvferry/instance cannot be read: {error}; update the older one of instance and router"
        ) from error
    if not facts.engine_id or not facts.model_names:
        raise ProtocolError("it says of itself neither which engine nor which model it is")
    return facts
