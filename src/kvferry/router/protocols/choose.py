"""Which form a hand-off takes, from what is known of P and of the decode instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from kvferry.router.config import HandOffMode, RouterConfig
from kvferry.router.instance import Facts, Instance, InstanceFacts, VllmFacts
from kvferry.router.protocols import kvferry
from kvferry.router.protocols.form import Form
from kvferry.router.protocols.mooncake import mooncake
from kvferry.router.protocols.nixl import nixl

CONCURRENT_CONNECTORS = frozenset({"P2pConnector", "P2pNcclConnector", "NixlConnector", "MooncakeConnector"})
"""Connectors of kvferry's whose D may ask P for a hand-off that P has not begun."""


def choose_form(config: RouterConfig, transfer_id: str, prefill: Instance, decodes: Sequence[Facts]) -> Form | None:
    """None: P cannot hand off now, as its bootstrap server, which the protocol needs, has not answered."""
    facts, told = prefill.facts, config.protocol
    if isinstance(facts, VllmFacts):
        if facts.bootstrap is not None:
            return mooncake(transfer_id, facts.bootstrap, at_once=config.hand_off != "sequential")
        return None if told == "mooncake" else nixl(transfer_id)
    if told == "mooncake":
        return None
    if told == "nixl":
        return nixl(transfer_id)
    if offers_concurrent(facts, decodes, config.hand_off):
        return kvferry.concurrent(transfer_id, prefill, facts)
    return kvferry.sequential(transfer_id)


def offers_concurrent(prefill: Facts, decodes: Sequence[Facts], mode: HandOffMode) -> TypeGuard[InstanceFacts]:
    """Whether D may be called together with this P: P has a control address, and every D is of the same kind.

    Another engine would take a ticket without blocks for one that is complete. A connector nobody here knows will do
    when concurrent hand-off is asked for by name.
    """
    if mode == "sequential" or not isinstance(prefill, InstanceFacts) or not prefill.kv_port:
        return False
    if mode != "concurrent" and prefill.connector not in CONCURRENT_CONNECTORS:
        return False
    return all(isinstance(one, InstanceFacts) and one.connector == prefill.connector for one in decodes)


def can_pair(prefill: Facts, decode: Facts) -> bool:
    """Whether one can read the other's KV at all: not kvferry's engine and vLLM, as far as is known."""
    return {type(prefill), type(decode)} != {InstanceFacts, VllmFacts}
