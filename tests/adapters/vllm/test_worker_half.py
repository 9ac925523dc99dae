"""The order in which a worker side is called, on the host and on a GPU, with a recording one in its place.

No GPU is needed: the stream is one of the test's, and what counts is that nothing is announced before the stream has
come to where it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.api import (
    ByLayers,
    Failed,
    Loaded,
    Prefilled,
    Released,
    ServesPeers,
    TransferReport,
    failures,
)
from kvferry.connectors.report_codec import decode_report
from kvferry.core.errors import PeerLost
from kvferry.core.messages.hand_off import PrefillResult

pytestmark = pytest.mark.vllm


class Recorder(ServesPeers[Any], ByLayers):
    """A worker side that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.report: TransferReport = []
        self.wake: Callable[[], None] = lambda: None

    def on_report(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def poll(self) -> TransferReport:
        report, self.report = self.report, []
        return report

    def address(self) -> None:
        return None

    def withdraw(self, plan: Any) -> None:
        self.calls.append(f"withdraw {plan}")

    def wait_layer(self, layer: int) -> None:
        self.calls.append(f"wait_layer {layer}")

    def save_layer(self, layer: int) -> None:
        self.calls.append(f"save_layer {layer}")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(" ".join(map(str, [name, *arguments])))


class LateRecorder(Recorder):
    """Has something to report whenever it has just said that it has not, and wakes the half."""

    def __init__(self, *reports: TransferReport) -> None:
        super().__init__()
        self.reports = list(reports)

    def poll(self) -> TransferReport:
        found = super().poll()
        if self.reports:
            self.report = self.reports.pop(0)
            self.wake()
        return found


class FakeStream:
    """Marks with numbers, in the order in which they were made; to wait for one is written down."""

    is_asynchronous = True

    def __init__(self, side: Recorder) -> None:
        self._side, self._num_marks = side, 0

    def mark(self) -> Any:
        number, self._num_marks = self._num_marks, self._num_marks + 1
        return SimpleNamespace(wait=lambda: self._side.calls.append(f"stream is at {number}"))


@pytest.fixture
def side() -> Recorder:
    return Recorder()


def make_half(
    side: Recorder,
    *,
    on_gpu: bool = False,
    groups: Sequence[tuple[str, ...]] = (("a", "b"),),
) -> Any:
    from kvferry.adapters.vllm.kv_cache.device import CpuDevice
    from kvferry.adapters.vllm.kv_cache.layout import GroupShape, KVCacheShape
    from kvferry.adapters.vllm.worker_half import WorkerHalf

    shape = KVCacheShape(tuple(GroupShape(names, (), 4) for names in groups))
    half: Any = WorkerHalf(SimpleNamespace(), shape, 0)  # type: ignore[arg-type]
    half.attach(side, FakeStream(side) if on_gpu else CpuDevice())
    return half


def step(**fields: Any) -> Any:
    from kvferry.adapters.vllm.messages import StepMetadata

    return StepMetadata(**({"plan": "plan", "computes": True} | fields))


def run(half: Any, metadata: Any, *, layers: tuple[str, ...] = ("a", "b")) -> Any:
    """One step as vLLM does it; no layers, as when a CUDA graph is replayed."""
    half.withdraw(metadata)
    if metadata.step_loads:
        half.start(metadata)
    for layer in layers:
        half.wait_layer(metadata, layer)
        half.side.calls.append(f"attention {layer}")
        half.save_layer(metadata, layer)
    if not metadata.step_loads:
        half.start(metadata)
    half.end_step(metadata)
    return half.report(metadata)


def told(results: Any) -> TransferReport:
    """What the scheduler side hears."""
    return decode_report(results.rank_report.transfers)


def test_layers_are_announced_as_they_come(side: Recorder) -> None:
    run(make_half(side), step())
    assert side.calls == [
        "withdraw plan",
        "start plan",
        "wait_layer 0",
        "attention a",
        "save_layer 0",
        "wait_layer 1",
        "attention b",
        "save_layer 1",
        "flush",
    ]


def test_layers_that_no_call_came_for_are_announced_at_the_end(side: Recorder) -> None:
    run(make_half(side), step(), layers=())
    assert side.calls == ["withdraw plan", "start plan", "save_layer 0", "save_layer 1", "flush"]


def test_on_a_gpu_each_layer_is_announced_when_the_stream_has_written_it(side: Recorder) -> None:
    run(make_half(side, on_gpu=True), step())
    assert side.calls == [
        "withdraw plan",
        "attention a",
        "attention b",
        "stream is at 0",  # the end of the steps before
        "start plan",
        "stream is at 1",
        "save_layer 0",
        "stream is at 2",
        "save_layer 1",
        "flush",
    ]


def test_on_a_gpu_layers_that_no_call_came_for_are_announced_at_the_end_of_the_model(side: Recorder) -> None:
    run(make_half(side, on_gpu=True), step(), layers=())
    assert side.calls == [
        "withdraw plan",
        "stream is at 0",
        "start plan",
        "stream is at 1",
        "save_layer 0",
        "stream is at 1",
        "save_layer 1",
        "flush",
    ]


def test_on_a_gpu_micro_batches_are_all_waited_for(side: Recorder) -> None:
    run(make_half(side, on_gpu=True), step(), layers=("a", "a", "b", "b"))
    assert side.calls[-7:] == [
        "stream is at 1",
        "stream is at 2",
        "save_layer 0",
        "stream is at 3",
        "stream is at 4",
        "save_layer 1",
        "flush",
    ]


def test_a_gpu_loads_what_a_step_needs_before_it_begins(side: Recorder) -> None:
    run(make_half(side, on_gpu=True), step(step_loads={"r": [3]}))
    assert side.calls[:6] == [
        "withdraw plan",
        "stream is at 0",
        "start plan",
        "wait_layer 0",
        "wait_layer 1",
        "attention a",
    ]


def test_a_gpu_is_not_waited_for_when_there_is_nothing_to_do(side: Recorder) -> None:
    run(make_half(side, on_gpu=True), step(plan=None))
    assert not [call for call in side.calls if call.startswith("stream")]


def test_the_end_of_a_load_is_reported_once(side: Recorder) -> None:
    half = make_half(side)
    run(half, step(loads={"r": [5, 6]}))
    side.report.append(Loaded("r"))
    assert run(half, step()).finished_recving == {"r"}
    side.report.append(Released("r"))  # it was aborted meanwhile
    results = run(half, step())
    assert not results.finished_recving | results.finished_sending
    assert told(results) == [Released("r")]
    half.check()


def test_an_aborted_load_is_reported_as_a_load(side: Recorder) -> None:
    half = make_half(side)
    run(half, step(loads={"r": [5, 6]}))
    side.report.append(Released("r"))
    results = run(half, step())
    assert results.finished_recving == {"r"}
    assert not results.finished_sending
    half.check()


def test_a_load_whose_blocks_may_still_be_written_to_has_not_failed_yet(side: Recorder) -> None:
    half = make_half(side)
    run(half, step(loads={"r": [5, 6], "s": [7]}))
    side.report += [Failed("r", PeerLost("gone"), "r's blocks"), Failed("s", PeerLost("gone"), "s's blocks")]
    assert not run(half, step()).finished_recving
    side.report += [Released("r's blocks"), Released("s")]  # the other was aborted
    results = run(half, step())
    assert results.finished_recving == {"r", "s"}
    assert results.failed_recving == {"r"}
    run(half, step(forgotten={"r"}))
    half.check()


PREFILLED = Prefilled("r", PrefillResult(first_token=1))
LONG_S = 600.0


def test_a_step_in_which_vllm_waits_for_loads_lasts_until_one_has_ended() -> None:
    """What vLLM is not told, as P's first token, does not end it."""
    side = LateRecorder([PREFILLED], [Loaded("r")], [Loaded("s")])
    half = make_half(side)
    assert run(half, step(loads={"r": [5], "s": [6]}, computes=False, wait_s=LONG_S)).finished_recving == {"r"}
    assert run(half, step(computes=False, wait_s=LONG_S)).finished_recving == {"s"}


def test_other_steps_do_not_wait_for_loads() -> None:
    side = LateRecorder([Loaded("r")])
    half = make_half(side)
    assert not run(half, step(loads={"r": [5]})).finished_recving
    assert run(half, step()).finished_recving == {"r"}


def test_a_rank_whose_loads_have_ended_waits_for_nothing(side: Recorder) -> None:
    """Another rank's has not."""
    half = make_half(side)
    side.report.append(Loaded("r"))
    waiting = {"computes": False, "wait_s": LONG_S}
    assert run(half, step(loads={"r": [5]}, **waiting)).finished_recving == {"r"}
    assert not run(half, step(**waiting)).finished_recving


def test_a_step_does_not_last_longer_than_it_may(side: Recorder) -> None:
    assert not run(make_half(side), step(loads={"r": [5]}, computes=False, wait_s=0.001)).finished_recving


def test_what_is_held_after_a_load_is_reported_as_sent(side: Recorder) -> None:
    """Even if it is released in the very step that says that the load is over."""
    half = make_half(side)
    run(half, step(loads={"r": [5, 6]}))
    side.report.append(Loaded("r"))
    assert run(half, step()).finished_recving == {"r"}
    side.report.append(Released("r"))
    results = run(half, step(forgotten={"r"}))
    assert (results.finished_recving, results.finished_sending) == (set(), {"r"})
    half.check()


def test_a_failed_load_of_a_step_names_its_blocks(side: Recorder) -> None:
    half = make_half(side)
    metadata = step(step_loads={"r": [7, 8]})
    half.start(metadata)
    side.report.append(Failed("r", PeerLost("gone")))
    results = half.report(metadata)
    assert results.invalid_block_ids == {7, 8}
    assert not results.finished_recving | results.failed_recving


def test_a_load_of_a_step_that_came_in_part_names_its_blocks(side: Recorder) -> None:
    half = make_half(side)
    metadata = step(step_loads={"r": [7, 8]})
    half.start(metadata)
    side.report.append(Loaded("r", 7))
    assert half.report(metadata).invalid_block_ids == {7, 8}
    half.check()


def test_a_load_of_fewer_tokens_names_the_blocks_that_lack_some(
    side: Recorder,
) -> None:
    half = make_half(side)
    run(half, step(loads={"r": [5, 6, 7]}))
    side.report.append(Loaded("r", 6))
    results = run(half, step(forgotten={"r"}))
    assert results.finished_recving == {"r"}
    assert results.invalid_block_ids == {6, 7}
    half.check()


# Several KV cache groups.

GROUPS = (("w0", "w1"), ("f0", "f1"), ("v0",))


def test_a_slot_is_written_when_the_layers_of_all_groups_are(side: Recorder) -> None:
    half = make_half(side, groups=GROUPS)
    for _ in range(2):
        side.calls.clear()
        run(half, step(), layers=("w0", "v0", "f0", "w1", "f1"))
        saved = [call for call in side.calls if call.startswith(("save", "attention", "flush"))]
        assert saved == [
            "attention w0",
            "attention v0",
            "attention f0",
            "save_layer 0",
            "attention w1",
            "attention f1",
            "save_layer 1",
            "flush",
        ]


def test_a_load_has_come_when_all_groups_have(side: Recorder) -> None:
    half = make_half(side, groups=GROUPS)
    run(half, step(loads={"r": [5, 6]}))
    side.report += [Loaded("r#0"), Loaded("r#2")]
    assert not run(half, step()).finished_recving
    side.report.append(Loaded("r#1"))
    results = run(half, step(forgotten={"r"}))
    assert results.finished_recving == {"r"}
    assert told(results) == [Loaded("r")]
    assert not results.failed_recving
    half.check()


@pytest.mark.parametrize("fewer", [False, True])
def test_a_load_fails_as_a_whole(side: Recorder, *, fewer: bool) -> None:
    """Once nothing is written any more, and never block by block, which vLLM does not take here."""
    half = make_half(side, groups=GROUPS)
    run(half, step(loads={"r": [5, 6, 7]}))
    if fewer:
        side.report.append(Loaded("r#1", 4))
    else:
        side.report.append(Failed("r#1", PeerLost("gone")))
    assert not run(half, step()).finished_recving
    side.report += [Loaded("r#0"), Loaded("r#2")]
    results = run(half, step(forgotten={"r"}))
    assert results.finished_recving == results.failed_recving == {"r"}
    assert not results.invalid_block_ids
    assert failures(told(results)).keys() == {"r"}
    half.check()


def test_blocks_are_free_when_all_groups_that_held_some_say_so(side: Recorder) -> None:
    half = make_half(side, groups=GROUPS)
    side.report += [Released("r#0"), Released("s#0"), Released("s#1")]
    assert not run(half, step(not_held={"r": [2]})).finished_sending
    side.report += [Released("r#1"), Released("s#2")]
    assert run(half, step()).finished_sending == {"r", "s"}
    half.check()
