"""The messages between the two halves of a connector, which vLLM passes between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.connectors.api import StepPlan
from kvferry.connectors.caching import StoreEvents
from kvferry.core.blocks.layout import KVLayout


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, with each step."""

    plan: StepPlan | None
    computes: bool
    """True if the model runs in this step."""
    loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests that wait for a load that begins in this step, with all their blocks."""
    step_loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests that run in this step, with the blocks that are loaded during it."""
    refused: set[str] = field(default_factory=set)
    """Requests that wait for a load that is not possible."""
    not_held: dict[str, list[int]] = field(default_factory=dict)
    """For each request whose blocks are held, the groups of which none are held. No report will come for these
    groups."""
    forgotten: set[str] = field(default_factory=set)
    """Requests that have ended, or whose load has ended. Blocks that are released for them from now on were held at the
    end of the request."""

    wait_s: float = 0.0
    """Maximum seconds for which the step waits for a report, if vLLM only waits for loads."""

    @property
    def has_work(self) -> bool:
        """True if a worker has work in this step."""
        notices = (self.loads, self.step_loads, self.refused, self.not_held, self.forgotten)
        return self.computes or self.plan is not None or any(notices)


@dataclass(frozen=True)
class WorkerFacts:
    """Facts that only the worker knows, beside the KV cache. The scheduler side is built from them."""

    layout: KVLayout
    address: dict[str, Any] | None
    is_alone: bool = True
    """True if this vLLM has no other connector."""
    hands_off: bool = True
    """True if this connector makes the hand-offs; False if another one in this vLLM does."""


@dataclass
class RankReport:
    """The report of one worker side. `transfers`: an encoded `TransferReport`, empty if there is none. It is encoded
    because vLLM pickles its messages, and errors keep their content only in kvferry's own encoding. `facts`: in the
    first report only. They are not part of vLLM's handshake: vLLM's MultiConnector has one handshake for all its
    children, and some of vLLM's own connectors accept only their own."""

    rank: int
    transfers: bytes = b""
    store: StoreEvents = field(default_factory=StoreEvents)
    facts: WorkerFacts | None = None

    def __bool__(self) -> bool:
        return bool(self.transfers or self.store or self.facts)


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: one report for each rank."""

    ranks: list[RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """The reports of both objects together."""
        if not isinstance(other, WorkerReports):
            raise TypeError(f"reports of kvferry's workers cannot be joined with a {type(other).__name__}")
        return WorkerReports([*self.ranks, *other.ranks])
