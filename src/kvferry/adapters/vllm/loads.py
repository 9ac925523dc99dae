"""The loads of one rank: translates the reports of its worker side to vLLM's results.

Owns the state of each load that vLLM waits for, or that runs in a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.adapters.vllm.messages import RankReport, StepMetadata
from kvferry.adapters.vllm.sections import by_group
from kvferry.connectors.api import Failed, Loaded, Prefilled, Released, TransferEvent, TransferReport
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.report_codec import encode_report
from kvferry.core.errors import LeakError, TransferError


@dataclass
class StepResults:
    """The results of a step for vLLM; the fields have vLLM's names."""

    rank_report: RankReport
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


@dataclass
class _Load:
    """A load that one of vLLM's requests waits for. `is_reported`: its end was reported."""

    block_ids: list[int]
    is_reported: bool = False


class Loads:
    """`num_groups`: number of vLLM's KV cache groups; if there are several, the worker side reports about sections of
    requests."""

    def __init__(self, block_size: int, num_groups: int) -> None:
        self._block_size, self._has_sections = block_size, num_groups > 1
        self._joined = RankReports(num_groups)
        self._running: dict[str, _Load] = {}
        self._step_loads: dict[str, list[int]] = {}
        self._failed_but_writing: dict[str, Failed] = {}
        """Failed loads that may still write to their blocks, by the name under which the blocks are held."""

    def begin(self, step: StepMetadata) -> None:
        """Record the loads that are part of the step's plan."""
        self._running.update((request_id, _Load(block_ids)) for request_id, block_ids in step.loads.items())
        self._step_loads.update(step.step_loads)

    @property
    def have_ended(self) -> bool:
        """True if there are loads, and all of them have ended on this rank."""
        return bool(self._running) and all(load.is_reported for load in self._running.values())

    def forget(self, request_ids: Iterable[str], *, unless_running: bool = False) -> None:
        """Forget the loads of these requests. Blocks that are released for them from now on were held at the end of the
        request."""
        for name in request_ids:
            if name in self._running and (self._running[name].is_reported or not unless_running):
                del self._running[name]

    def translate_for_vllm(self, report: TransferReport) -> TransferReport:
        """The report without P's first token, because vLLM as D samples the first token itself. vLLM cannot give a
        request other blocks, so a load that may still write to its blocks does not count as failed yet."""
        translated: TransferReport = []
        for event in report:
            match event:
                case Failed(held_under=name) if name:
                    self._failed_but_writing[name] = event
                case Released(name) if name in self._failed_but_writing:
                    translated.append(msgspec.structs.replace(self._failed_but_writing.pop(name), held_under=""))
                case Released(request_id):
                    self._failed_but_writing = {
                        name: failure
                        for name, failure in self._failed_but_writing.items()
                        if failure.request_id != request_id
                    }
                    translated.append(event)
                case Prefilled():
                    pass
                case _:
                    translated.append(event)
        return translated

    def add_results(self, events: TransferReport, not_held: Mapping[str, Sequence[int]], results: StepResults) -> None:
        """Add these events to `results`. `not_held`: by request id, the groups whose blocks are not held at the
        request's end."""
        report = self._join_sections(events, not_held) if self._has_sections else events
        for event in report:
            self._add_event(event, results)
        results.rank_report.transfers = encode_report(report) if report else b""

    def _join_sections(self, report: TransferReport, not_held: Mapping[str, Sequence[int]]) -> TransferReport:
        """If the connector reports about parts of requests, turn the events into events of whole requests."""
        for group, section in by_group(report).items():
            self._joined.add(group, section)
        for request_id, groups in not_held.items():
            for group in groups:
                self._joined.add(group, [Released(request_id)])
        return [_fail_partial(event) for event in self._joined.take()]

    def _add_event(self, event: TransferEvent, results: StepResults) -> None:
        request_id = event.request_id
        match event:
            case Loaded(num_tokens=num_tokens):
                self._finish_load(request_id, results)
                if num_tokens is not None and request_id in self._running:
                    missing = self._running[request_id].block_ids[num_tokens // self._block_size :]
                    results.invalid_block_ids.update(missing)
                by_layer = self._step_loads.pop(request_id, ())
                if num_tokens is not None:  # vLLM may have computed these from KV that never arrived
                    results.invalid_block_ids.update(by_layer)
            case Failed():
                self._finish_load(request_id, results)
                if request_id in self._running:
                    results.failed_recving.add(request_id)
                results.invalid_block_ids.update(self._step_loads.pop(request_id, ()))
            case Released() if request_id in self._running:  # an aborted load: vLLM frees the blocks when the load ends
                self._finish_load(request_id, results)
                del self._running[request_id]
            case Released():
                results.finished_sending.add(request_id)

    def _finish_load(self, request_id: str, results: StepResults) -> None:
        load = self._running.get(request_id)
        if load is not None and not load.is_reported:
            load.is_reported = True
            results.finished_recving.add(request_id)

    def check(self) -> None:
        """Raise `LeakError` if state of ended requests is left."""
        if left := [*self._running, *self._step_loads]:
            raise LeakError(f"loads of vLLM's requests {left[:8]} are not forgotten")
        self._joined.check()


def _fail_partial(event: TransferEvent) -> TransferEvent:
    """The event as a failure if it is a partial load: with several groups, vLLM does not accept reports about single
    blocks."""
    if isinstance(event, Loaded) and event.num_tokens is not None:
        return Failed(event.request_id, TransferError("only the KV of the beginning of the prompt arrived"))
    return event
