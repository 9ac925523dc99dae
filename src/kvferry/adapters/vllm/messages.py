"""What passes between the halves of a connector through vLLM, which carries it between its own processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.connectors.api import StepPlan, StoreEvents
from kvferry.core.layout import KVLayout


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler → every worker, with each step."""

    plan: StepPlan | None
    computes: bool
    """Whether the model runs in this step."""
    loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests that wait until their load, begun in this step, is reported, with all their blocks."""
    step_loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests that run in this very step, with the blocks that are loaded meanwhile."""
    refused: set[str] = field(default_factory=set)
    """Requests that wait for a load which cannot be had."""
    not_held: dict[str, list[int]] = field(default_factory=dict)
    """Of requests whose blocks are held: the groups that none is held of, and of which nothing will be reported."""
    forgotten: set[str] = field(default_factory=set)
    """Requests whose load is over, or is over with them: the next that is released of them is what they held."""

    @property
    def has_work(self) -> bool:
        """Whether a worker has anything to do with it."""
        told = (self.loads, self.step_loads, self.refused, self.not_held, self.forgotten)
        return self.computes or self.plan is not None or any(told)


@dataclass
class RankReport:
    """What one worker's side had to say. `transfers`: an encoded `TransferReport`, since vLLM pickles what it carries
    and our errors keep what they say only in our own encoding; empty for an empty one."""

    rank: int
    transfers: bytes = b""
    store: StoreEvents = field(default_factory=StoreEvents)

    def __bool__(self) -> bool:
        return bool(self.transfers or self.store)


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """Workers → scheduler: one report a rank."""

    ranks: list[RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Both."""
        if not isinstance(other, WorkerReports):
            raise TypeError(f"reports of kvferry's workers cannot be joined with a {type(other).__name__}")
        return WorkerReports([*self.ranks, *other.ranks])


@dataclass(frozen=True)
class WorkerFacts:
    """What the scheduler side is built with, and known only beside the KV cache."""

    layout: KVLayout
    address: dict[str, Any] | None


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker → scheduler, once, before any request. vLLM's MultiConnector hands only one child's on, to all of them:
    so it holds those of all kvferry's connectors in this worker, by `AdapterSettings.key`."""

    facts: dict[str, WorkerFacts]
