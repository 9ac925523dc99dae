"""Chooses the form of hand-off between P and the decode instances from their facts."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from functools import lru_cache, partial

from kvferry.core.errors import LayoutMismatch
from kvferry.core.messages.instance_facts import InstanceFacts, KVSource, TicketKinds
from kvferry.core.text import shortened
from kvferry.router.config import HandOffMode, RouterConfig
from kvferry.router.instances.instance import Facts, Instance, LegRole, SglangFacts, UnknownFacts, VllmFacts
from kvferry.router.protocols import kvferry
from kvferry.router.protocols.dynamo import dynamo
from kvferry.router.protocols.form import MakeForm
from kvferry.router.protocols.keys import PROTOCOL, keys
from kvferry.router.protocols.mooncake import mooncake
from kvferry.router.protocols.nixl import nixl
from kvferry.router.protocols.sglang import sglang

logger = logging.getLogger(__name__)

CONCURRENT_CONNECTORS = frozenset({"P2pConnector", "P2pNcclConnector", "NixlConnector", "MooncakeConnector"})
"""kvferry's connectors whose D may ask P for a hand-off before P has begun it."""

_ENGINES: dict[type, str] = {VllmFacts: "vllm", SglangFacts: "sglang"}
"""Names of the engines that the router recognises."""

_MAX_CACHED_PAIRS = 1024
"""Maximum number of cached comparisons of two layouts, and of two connectors' tickets."""


def engine_of(facts: Facts) -> str:
    """The name of an instance's engine; empty if it is unknown."""
    return facts.stack if isinstance(facts, InstanceFacts) else _ENGINES.get(type(facts), "")


def choose_form(config: RouterConfig, prefill: Instance, decodes: Collection[Facts]) -> MakeForm | None:
    """Return the function that makes the form of each hand-off from this prefill instance; valid until the facts of an
    instance change. None: P cannot hand off now, because its bootstrap server, which the protocol needs, has not
    answered, or P has failed since."""
    facts, protocol = prefill.facts, config.protocol
    if isinstance(facts, SglangFacts):
        port = facts.bootstrap_port or prefill.address.bootstrap_port
        return partial(sglang, host=prefill.address.host, bootstrap_port=port)
    if isinstance(facts, InstanceFacts) and facts.stack == "dynamo":
        return dynamo
    if protocol == PROTOCOL:
        return keys
    if isinstance(facts, VllmFacts) and facts.bootstrap is not None:
        if prefill.process.is_stale:
            return None  # the ids of its engines may have changed
        return partial(mooncake, bootstrap=facts.bootstrap, concurrent=config.hand_off != "sequential")
    if protocol == "mooncake":
        return None
    speaks_nixl = isinstance(facts, VllmFacts) or protocol == "nixl"
    source = early_source(prefill, decodes, config.hand_off)
    if source is not None:
        return kvferry.concurrent(source, takes_first_token=not speaks_nixl)
    if speaks_nixl:
        return nixl
    return partial(kvferry.sequential, is_known=not isinstance(facts, UnknownFacts))


def early_source(prefill: Instance, decodes: Collection[Facts], mode: HandOffMode) -> KVSource | None:
    """The address at which D may ask P before P has answered; None if it is unknown or a D is of another kind than P.

    Another engine would take a ticket without blocks for a complete one. With `--hand-off concurrent`, kvferry's
    instances may have any connector, and vLLM's servers are asked early too, although D cannot learn how much P had
    cached; their first ticket contains the source. A server with several sources is data-parallel, and may answer from
    any of them.
    """
    if mode == "sequential":
        return None
    match prefill.confirmed:
        case InstanceFacts(connector=connector) as facts if mode == "concurrent" or connector in CONCURRENT_CONNECTORS:
            is_same_kind = all(
                isinstance(decode, InstanceFacts) and decode.connector == connector for decode in decodes
            )
            return facts.source(prefill.address.host) if is_same_kind else None
        case VllmFacts(sources=[source]) if mode == "concurrent":
            return source if all(isinstance(decode, VllmFacts) for decode in decodes) else None
    return None


def can_pair(prefill: Facts, decode: Facts) -> bool:
    """True if P can hand off to D, as far as their facts say (`unpaired_reason`)."""
    return not unpaired_reason(prefill, decode)


def unpaired_reason(prefill: Facts, decode: Facts) -> str:
    """Reason why P cannot hand off to D; empty if it can, as far as their facts say: they are compatible
    (`are_compatible`), have a connector, were not started for the other role, and D reads the tickets that P writes."""
    if (
        reason := missing_part_reason(prefill, "prefill")
        or missing_part_reason(decode, "decode")
        or _incompatible_reason(prefill, decode)
    ):
        return reason
    if isinstance(prefill, InstanceFacts) and isinstance(decode, InstanceFacts):
        return _ticket_difference(prefill.connector, prefill.tickets, decode.connector, decode.tickets)
    return ""


def unpaired_by_keys_reason(prefill: Facts, decode: Facts) -> str:
    """The reason why P cannot hand off to D by keys in a store; empty: it can, as far as is known: both are
    `are_compatible` and keep keys, and were not started for the other role. It is not known if they share the store: if
    not, D computes the prompt."""
    parts: tuple[tuple[Facts, LegRole], ...] = ((prefill, "prefill"), (decode, "decode"))
    for facts, part in parts:
        if reason := _other_role_reason(facts, part):
            return reason
        if isinstance(facts, InstanceFacts) and not facts.keeps_keys:
            return f"the {part} instance keeps no KV under keys"
    return _incompatible_reason(prefill, decode)


def missing_part_reason(facts: Facts, part: LegRole) -> str:
    """Reason why an instance cannot have this part in any hand-off; empty if it can."""
    if reason := _other_role_reason(facts, part):
        return reason
    if isinstance(facts, InstanceFacts) and not facts.can_serve_as(part):
        if facts.connector is None:
            return f"the {part} instance has no connector"
        return f"the {part} instance's {facts.connector} {'writes' if part == 'prefill' else 'reads'} no tickets"
    return ""


def _other_role_reason(facts: Facts, part: LegRole) -> str:
    match facts:
        case InstanceFacts(role=role) if role not in ("both", part):
            return f"the {part} instance was started for {role}"
        case SglangFacts(mode=mode) if mode not in ("null", part):
            return f"the {part} instance was started for {mode}"
    return ""


def are_compatible(first: Facts, second: Facts) -> bool:
    """True if two instances can read each other's KV and continue each other's answers, as far as their facts say: the
    same engine and model, and KV layouts that can be reconciled."""
    return not _incompatible_reason(first, second)


def _incompatible_reason(first: Facts, second: Facts) -> str:
    if reason := _difference("engine", engine_of(first), engine_of(second)):
        return reason
    if isinstance(first, InstanceFacts) and isinstance(second, InstanceFacts):
        if first.layout == second.layout:
            return ""
        return "they differ in model files" if first.stack == "dynamo" else _layout_difference(first, second)
    if isinstance(first, VllmFacts) and isinstance(second, VllmFacts):
        return _difference("KV cache dtype", first.cache_dtype, second.cache_dtype) or _model_difference(first, second)
    if isinstance(first, SglangFacts) and isinstance(second, SglangFacts):
        return (
            _difference("transfer backend", first.transfer_backend, second.transfer_backend)
            or _difference("KV cache dtype", first.cache_dtype, second.cache_dtype)
            or _difference("model", first.model_names, second.model_names)
        )
    return ""


def _model_difference(first: VllmFacts, second: VllmFacts) -> str:
    is_shared = not set(first.model_names).isdisjoint(second.model_names)
    return "" if is_shared else _difference("model", first.model_names, second.model_names)


def _difference(property_name: str, first: str | list[str], second: str | list[str]) -> str:
    """The difference of two values as a sentence; empty if they are equal or one of them is unknown."""
    if not (first and second) or first == second:
        return ""
    return f"they differ in {property_name}: {_truncate(first)} and {_truncate(second)}"


def _truncate(value: str | list[str]) -> str:
    return shortened(value if isinstance(value, str) else ", ".join(value), 80)


@lru_cache(maxsize=_MAX_CACHED_PAIRS)
def _ticket_difference(
    prefill: str | None, prefill_kinds: TicketKinds, decode: str | None, decode_kinds: TicketKinds
) -> str:
    """The difference of written and read tickets. Called for each request, but logged once for each pair."""
    if prefill_kinds.is_readable_by(decode_kinds):
        return ""
    writes, reads = " and ".join(prefill_kinds.writes or ()), " and ".join(decode_kinds.reads or ())
    reason = f"{prefill} at prefill writes tickets of kind {writes}, and {decode} at decode reads {reads}"
    logger.warning("instances that could not hand off to each other are not paired: %s", reason)
    return reason


_Layouts = tuple[str | None, str | None]
_layouts_differ: OrderedDict[_Layouts, str] = OrderedDict()
"""Differences by both fingerprints, since they are needed for each request and a layout has many layers."""


def _layout_difference(prefill: InstanceFacts, decode: InstanceFacts) -> str:
    if prefill.kv_layout is None or decode.kv_layout is None:
        return ""
    names = (prefill.layout, decode.layout)
    if names not in _layouts_differ:
        try:
            prefill.kv_layout.require_reconcilable(decode.kv_layout)
            _layouts_differ[names] = ""
        except LayoutMismatch as error:
            logger.warning("instances that could not read each other's KV are not paired: %s", error)
            _layouts_differ[names] = str(error)
        if len(_layouts_differ) > _MAX_CACHED_PAIRS:
            _layouts_differ.popitem(last=False)
    return _layouts_differ[names]
