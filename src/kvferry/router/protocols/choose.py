"""Which form of hand-off P and the decode instances can use, given what is known about them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from functools import lru_cache, partial

from kvferry.core.errors import LayoutMismatch
from kvferry.core.messages.instance_facts import InstanceFacts, KVSource, TicketKinds
from kvferry.router.config import HandOffMode, RouterConfig
from kvferry.router.instances.instance import Absent, Facts, Instance, LegRole, SglangFacts, VllmFacts
from kvferry.router.protocols import kvferry
from kvferry.router.protocols.form import MakeForm
from kvferry.router.protocols.keys import PROTOCOL, keys
from kvferry.router.protocols.mooncake import mooncake
from kvferry.router.protocols.nixl import nixl
from kvferry.router.protocols.sglang import sglang

logger = logging.getLogger(__name__)

CONCURRENT_CONNECTORS = frozenset({"P2pConnector", "P2pNcclConnector", "NixlConnector", "MooncakeConnector"})
"""Connectors of kvferry's whose D may ask P for a hand-off that P has not begun."""

_MOST_REMEMBERED = 1024
"""Most combinations of instances for which it is remembered whether they fit."""


def choose_form(config: RouterConfig, prefill: Instance, decodes: Collection[Facts]) -> MakeForm | None:
    """A function that makes the form of each hand-off from this prefill instance, until something new is known of any
    instance. None: P cannot hand off now, because its bootstrap server, which the protocol needs, has not answered, or
    P has failed since then."""
    facts, told = prefill.facts, config.protocol
    if isinstance(facts, SglangFacts):
        port = facts.bootstrap_port or prefill.address.bootstrap_port
        return partial(sglang, host=prefill.address.host, bootstrap_port=port)
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
    return partial(kvferry.sequential, is_known=not isinstance(facts, Absent))


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
    """Whether one can hand off to the other at all, as far as is known: both are `alike`, have a connector, were not
    started for the other role, and D reads the tickets that P writes."""
    if not (_has_part(prefill, "prefill") and _has_part(decode, "decode") and alike(prefill, decode)):
        return False
    if not (isinstance(prefill, InstanceFacts) and isinstance(decode, InstanceFacts)):
        return True
    return _tickets_fit(prefill.connector, prefill.tickets, decode.connector, decode.tickets)


def can_pair_by_keys(prefill: Facts, decode: Facts) -> bool:
    """Whether one can hand off to the other by keys in a store, as far as is known: both are `alike` and keep keys, and
    were not started for the other role. Whether they share the store is not known: where not, D computes."""
    has_parts = _has_role(prefill, "prefill") and _has_role(decode, "decode")
    keep = all(one.keeps_keys for one in (prefill, decode) if isinstance(one, InstanceFacts))
    return has_parts and keep and alike(prefill, decode)


def _has_role(facts: Facts, part: LegRole) -> bool:
    return facts.role in ("both", part) if isinstance(facts, InstanceFacts) else _has_part(facts, part)


def alike(one: Facts, other: Facts) -> bool:
    """Whether two instances compute the same, and one could read the other's KV, as far as is known: not different
    engines, nor instances whose layouts cannot be reconciled, nor those that serve different models."""
    if isinstance(one, InstanceFacts) and isinstance(other, InstanceFacts):
        return one.layout == other.layout or _can_reconcile(one, other)
    if isinstance(one, VllmFacts) and isinstance(other, VllmFacts):
        same_dtype = not (one.cache_dtype and other.cache_dtype) or one.cache_dtype == other.cache_dtype
        share_model = not (one.model_names and other.model_names) or not set(one.model_names).isdisjoint(
            other.model_names
        )
        return same_dtype and share_model
    if isinstance(one, SglangFacts) and isinstance(other, SglangFacts):
        pairs = (
            (one.transfer_backend, other.transfer_backend),
            (one.cache_dtype, other.cache_dtype),
            (one.model_names, other.model_names),
        )
        return all(not (ours and theirs) or ours == theirs for ours, theirs in pairs)
    known = {type(one), type(other)} & {InstanceFacts, VllmFacts, SglangFacts}
    return len(known) < 2


def _has_part(facts: Facts, part: LegRole) -> bool:
    match facts:
        case InstanceFacts():
            return facts.has_part(part)
        case SglangFacts(mode=mode):
            return mode in ("null", part)
    return True


@lru_cache(maxsize=_MOST_REMEMBERED)
def _tickets_fit(prefill: str | None, of_prefill: TicketKinds, decode: str | None, of_decode: TicketKinds) -> bool:
    """Whether D reads a kind of ticket that P writes. Asked for each request, but logged once for each pair."""
    if of_prefill.fit(of_decode):
        return True
    logger.warning(
        "instances that could not hand off to each other are not paired: %s at prefill writes tickets of kind %s, and"
        " %s at decode reads %s",
        prefill,
        " and ".join(of_prefill.writes or ()),
        decode,
        " and ".join(of_decode.reads or ()),
    )
    return False


_Layouts = tuple[str | None, str | None]
_reconciled: OrderedDict[_Layouts, bool] = OrderedDict()
"""Results by both fingerprints: they are asked for with each request, and a layout has many layers."""


def _can_reconcile(prefill: InstanceFacts, decode: InstanceFacts) -> bool:
    if prefill.kv_layout is None or decode.kv_layout is None:
        return True
    names = (prefill.layout, decode.layout)
    if names not in _reconciled:
        try:
            prefill.kv_layout.require_reconcilable(decode.kv_layout)
            _reconciled[names] = True
        except LayoutMismatch as error:
            logger.warning("instances that could not read each other's KV are not paired: %s", error)
            _reconciled[names] = False
        if len(_reconciled) > _MOST_REMEMBERED:
            _reconciled.popitem(last=False)
    return _reconciled[names]
