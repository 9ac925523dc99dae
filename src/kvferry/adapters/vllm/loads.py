"""The loads of one rank: what its worker side reports, told as vLLM understands it.

Owns the state of each load that vLLM was told to wait for, or that runs in a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.adapters.vllm.messages import RankReport, StepMetadata
from kvferry.adapters.vllm.parts import by_group
from kvferry.connectors.api import Failed, Loaded, Prefilled, Released, TransferEvent, TransferReport
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.report_codec import encode_report
from kvferry.core.errors import LeakError, TransferError


@dataclass
class StepResults:
    """What vLLM gets after a step; the fields have vLLM's names."""

    rank_report: RankReport
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


@dataclass
class _Load:
    """A load that a request of vLLM's waits for, and whether its end was reported."""

    block_ids: list[int]
    reported: bool = False


class Loads:
    """`num_groups`: vLLM's KV cache groups; with several, the worker side reports about parts of requests."""

    def __init__(self, block_size: int, num_groups: int) -> None:
        self._block_size, self._has_parts = block_size, num_groups > 1
        self._joined = RankReports(num_groups)
        self._running: dict[str, _Load] = {}
        self._of_step: dict[str, list[int]] = {}
        self._unended: dict[str, Failed] = {}
        """Loads that have failed, by the name under which their blocks are kept aside."""

    def begin(self, step: StepMetadata) -> None:
        """Note the loads that are part of the step's plan."""
        self._running.update((request_id, _Load(block_ids)) for request_id, block_ids in step.loads.items())
        self._of_step.update(step.step_loads)

    @property
    def are_over(self) -> bool:
        """Whether there are loads, and all of them have ended on this rank."""
        return bool(self._running) and all(load.reported for load in self._running.values())

    def forget(self, request_ids: Iterable[str], *, unless_running: bool = False) -> None:
        """What is released for these requests from now on are blocks that they held at their end."""
        for name in request_ids:
            if name in self._running and (self._running[name].reported or not unless_running):
                del self._running[name]

    def as_vllm_hears_it(self, report: TransferReport) -> TransferReport:
        """The report without P's first token, because vLLM's D samples it itself. vLLM cannot give a request other
        blocks, so a load that may still write to its blocks does not count as failed yet."""
        heard: TransferReport = []
        for event in report:
            match event:
                case Failed(kept_as=name) if name:
                    self._unended[name] = event
                case Released(name) if name in self._unended:
                    heard.append(msgspec.structs.replace(self._unended.pop(name), kept_as=""))
                case Released(request_id):
                    self._unended = {name: one for name, one in self._unended.items() if one.request_id != request_id}
                    heard.append(event)
                case Prefilled():
                    pass
                case _:
                    heard.append(event)
        return heard

    def tell(self, heard: TransferReport, not_held: Mapping[str, Sequence[int]], results: StepResults) -> None:
        """Add to `results` what has happened. `not_held`: by request, the groups whose blocks are not held at its
        end."""
        report = self._of_requests(heard, not_held) if self._has_parts else heard
        for event in report:
            self._tell(event, results)
        results.rank_report.transfers = encode_report(report) if report else b""

    def _of_requests(self, report: TransferReport, not_held: Mapping[str, Sequence[int]]) -> TransferReport:
        """The events of whole requests, where the connector reports about their parts."""
        for group, part in by_group(report).items():
            self._joined.add(group, part)
        for request_id, groups in not_held.items():
            for group in groups:
                self._joined.add(group, [Released(request_id)])
        return [_whole_or_failed(event) for event in self._joined.take()]

    def _tell(self, event: TransferEvent, results: StepResults) -> None:
        request_id = event.request_id
        match event:
            case Loaded(num_tokens=num_tokens):
                self._ended(request_id, results)
                if num_tokens is not None and request_id in self._running:
                    missing = self._running[request_id].block_ids[num_tokens // self._block_size :]
                    results.invalid_block_ids.update(missing)
                by_layer = self._of_step.pop(request_id, ())
                if num_tokens is not None:  # vLLM may have computed these from KV that never came
                    results.invalid_block_ids.update(by_layer)
            case Failed():
                self._ended(request_id, results)
                if request_id in self._running:
                    results.failed_recving.add(request_id)
                results.invalid_block_ids.update(self._of_step.pop(request_id, ()))
            case Released() if request_id in self._running:  # an aborted load: vLLM frees its blocks when it ends
                self._ended(request_id, results)
                del self._running[request_id]
            case Released():
                results.finished_sending.add(request_id)

    def _ended(self, request_id: str, results: StepResults) -> None:
        load = self._running.get(request_id)
        if load is not None and not load.reported:
            load.reported = True
            results.finished_recving.add(request_id)

    def check(self) -> None:
        """Raise `LeakError` if something is kept of requests that are gone."""
        if kept := [*self._running, *self._of_step]:
            raise LeakError(f"loads of vLLM's requests {kept[:8]} are not forgotten")
        self._joined.check()


def _whole_or_failed(event: TransferEvent) -> TransferEvent:
    """Return a partial load as failed: with several groups, vLLM does not accept reports about single blocks."""
    if isinstance(event, Loaded) and event.num_tokens is not None:
        return Failed(event.request_id, TransferError("only the KV of the beginning of the prompt arrived"))
    return event
