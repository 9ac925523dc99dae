"""Which form of hand-off P and the decode instances can use, given what is known about them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from functools import lru_cache, partial

from kvferry.core.errors import LayoutMismatch
from kvferry.core.messages.instance_facts import InstanceFacts, KVSource, TicketKinds
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
"""Connectors of kvferry's whose D may ask P for a hand-off that P has not begun."""

_ENGINES: dict[type, str] = {VllmFacts: "vllm", SglangFacts: "sglang"}
"""Names of the engines that are recognised."""

_LONGEST_VALUE = 80
_MAX_REMEMBERED = 1024
"""Most combinations of instances for which it is remembered whether they fit."""


def engine_of(facts: Facts) -> str:
    """Whose engine an instance is; empty where it is not known."""
    return facts.stack if isinstance(facts, InstanceFacts) else _ENGINES.get(type(facts), "")


def choose_form(config: RouterConfig, prefill: Instance, decodes: Collection[Facts]) -> MakeForm | None:
    """A function that makes the form of each hand-off from this prefill instance, until something new is known of any
    instance. None: P cannot hand off now, because its bootstrap server, which the protocol needs, has not answered, or
    P has failed since then."""
    facts, told = prefill.facts, config.protocol
    if isinstance(facts, SglangFacts):
        port = facts.bootstrap_port or prefill.address.bootstrap_port
        return partial(sglang, host=prefill.address.host, bootstrap_port=port)
    if isinstance(facts, InstanceFacts) and facts.stack == "dynamo":
        return dynamo
    if told == PROTOCOL:
        return keys
    if isinstance(facts, VllmFacts) and facts.bootstrap is not None:
        if prefill.is_doubted:
            return None  # its engines may have other ids by now
        return partial(mooncake, bootstrap=facts.bootstrap, at_once=config.hand_off != "sequential")
    if told == "mooncake":
        return None
    speaks_nixl = isinstance(facts, VllmFacts) or told == "nixl"
    origin = early_origin(prefill, decodes, config.hand_off)
    if origin is not None:
        return kvferry.concurrent(origin, takes_first_token=not speaks_nixl)
    if speaks_nixl:
        return nixl
    return partial(kvferry.sequential, is_known=not isinstance(facts, UnknownFacts))


def early_origin(prefill: Instance, decodes: Collection[Facts], mode: HandOffMode) -> KVSource | None:
    """Where D may ask P before P has answered: where that is known, and every D is of the same kind as P.

    Another engine would take a ticket without blocks for one that is complete. Of kvferry's instances, a connector that
    nobody here knows will do when concurrent hand-off is asked for by name. vLLM servers are asked early only then,
    too, as D cannot learn how much P had in its cache; their first ticket tells the origin. A server with several
    origins is data-parallel, and may answer from any of them.
    """
    if mode == "sequential":
        return None
    match prefill.confirmed:
        case InstanceFacts(connector=connector) as facts if mode == "concurrent" or connector in CONCURRENT_CONNECTORS:
            same = all(isinstance(one, InstanceFacts) and one.connector == connector for one in decodes)
            return facts.origin(prefill.address.host) if same else None
        case VllmFacts(origins=[origin]) if mode == "concurrent":
            return origin if all(isinstance(one, VllmFacts) for one in decodes) else None
    return None


def can_pair(prefill: Facts, decode: Facts) -> bool:
    """Whether one can hand off to the other at all, as far as is known (`why_not_paired`)."""
    return not why_not_paired(prefill, decode)


def why_not_paired(prefill: Facts, decode: Facts) -> str:
    """Why one cannot hand off to the other; empty if it can, as far as is known: both are `alike`, have a connector,
    were not started for the other role, and D reads the tickets that P writes."""
    if (
        why := why_without_part(prefill, "prefill")
        or why_without_part(decode, "decode")
        or _why_unlike(prefill, decode)
    ):
        return why
    if isinstance(prefill, InstanceFacts) and isinstance(decode, InstanceFacts):
        return _why_tickets_differ(prefill.connector, prefill.tickets, decode.connector, decode.tickets)
    return ""


def can_pair_by_keys(prefill: Facts, decode: Facts) -> bool:
    """Whether one can hand off to the other by keys in a store, as far as is known (`why_not_paired_by_keys`)."""
    return not why_not_paired_by_keys(prefill, decode)


def why_not_paired_by_keys(prefill: Facts, decode: Facts) -> str:
    """Why one cannot hand off to the other by keys in a store; empty if it can, as far as is known: both are `alike`
    and keep keys, and were not started for the other role. Whether they share the store is not known: where not, D
    computes."""
    parts: tuple[tuple[Facts, LegRole], ...] = ((prefill, "prefill"), (decode, "decode"))
    for facts, part in parts:
        if why := _why_other_role(facts, part):
            return why
        if isinstance(facts, InstanceFacts) and not facts.keeps_keys:
            return f"the {part} instance keeps no KV under keys"
    return _why_unlike(prefill, decode)


def why_without_part(facts: Facts, part: LegRole) -> str:
    """Why an instance cannot have this part in hand-offs, whatever the other instance is; empty if it can."""
    if why := _why_other_role(facts, part):
        return why
    if isinstance(facts, InstanceFacts) and not facts.can_serve_as(part):
        if facts.connector is None:
            return f"the {part} instance has no connector"
        return f"the {part} instance's {facts.connector} {'writes' if part == 'prefill' else 'reads'} no tickets"
    return ""


def _why_other_role(facts: Facts, part: LegRole) -> str:
    match facts:
        case InstanceFacts(role=role) if role not in ("both", part):
            return f"the {part} instance was started for {role}"
        case SglangFacts(mode=mode) if mode not in ("null", part):
            return f"the {part} instance was started for {mode}"
    return ""


def alike(one: Facts, other: Facts) -> bool:
    """Whether two instances compute the same, and one could read the other's KV, as far as is known: not different
    engines, nor instances whose layouts cannot be reconciled, nor those that serve different models."""
    return not _why_unlike(one, other)


def _why_unlike(one: Facts, other: Facts) -> str:
    if why := _why_differ("engine", engine_of(one), engine_of(other)):
        return why
    if isinstance(one, InstanceFacts) and isinstance(other, InstanceFacts):
        if one.layout == other.layout:
            return ""
        return "they differ in model files" if one.stack == "dynamo" else _why_layouts_differ(one, other)
    if isinstance(one, VllmFacts) and isinstance(other, VllmFacts):
        return _why_differ("KV cache dtype", one.cache_dtype, other.cache_dtype) or _why_models_differ(one, other)
    if isinstance(one, SglangFacts) and isinstance(other, SglangFacts):
        return (
            _why_differ("transfer backend", one.transfer_backend, other.transfer_backend)
            or _why_differ("KV cache dtype", one.cache_dtype, other.cache_dtype)
            or _why_differ("model", one.model_names, other.model_names)
        )
    return ""


def _why_models_differ(one: VllmFacts, other: VllmFacts) -> str:
    is_shared = not set(one.model_names).isdisjoint(other.model_names)
    return "" if is_shared else _why_differ("model", one.model_names, other.model_names)


def _why_differ(what: str, one: str | list[str], other: str | list[str]) -> str:
    """Empty if both are equal, or if one is not known."""
    if not (one and other) or one == other:
        return ""
    return f"they differ in {what}: {_clipped(one)} and {_clipped(other)}"


def _clipped(value: str | list[str]) -> str:
    text = value if isinstance(value, str) else ", ".join(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


@lru_cache(maxsize=_MAX_REMEMBERED)
def _why_tickets_differ(
    prefill: str | None, of_prefill: TicketKinds, decode: str | None, of_decode: TicketKinds
) -> str:
    """Asked for each request, but logged once for each pair."""
    if of_prefill.is_readable_by(of_decode):
        return ""
    writes, reads = " and ".join(of_prefill.writes or ()), " and ".join(of_decode.reads or ())
    why = f"{prefill} at prefill writes tickets of kind {writes}, and {decode} at decode reads {reads}"
    logger.warning("instances that could not hand off to each other are not paired: %s", why)
    return why


_Layouts = tuple[str | None, str | None]
_layouts_differ: OrderedDict[_Layouts, str] = OrderedDict()
"""Results by both fingerprints: they are asked for with each request, and a layout has many layers."""


def _why_layouts_differ(prefill: InstanceFacts, decode: InstanceFacts) -> str:
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
        if len(_layouts_differ) > _MAX_REMEMBERED:
            _layouts_differ.popitem(last=False)
    return _layouts_differ[names]
