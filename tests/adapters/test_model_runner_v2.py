"""The calls that vLLM's Model Runner V2 makes of a connector, made by its own class for them, without a device.

`ActiveKVConnector` is what that runner has between itself and a connector; it needs neither Triton nor a GPU. What the
runner does around it is not run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.vllm.test_worker_half import Recorder, make_half, step

pytestmark = pytest.mark.vllm


class Runner:
    """Model Runner V2's way through a step: `execute_model` up to the forward, then `sample_tokens`."""

    def __init__(self, active: Any, side: Recorder) -> None:
        self.active, self._side = active, side

    def run(self, metadata: Any, layers: tuple[str, ...] = ("a", "b")) -> Any:
        output = SimpleNamespace(
            kv_connector_metadata=metadata, has_sync_kv_loads=bool(metadata.step_loads), finished_req_ids=set()
        )
        if not metadata.computes:
            return self.active.no_forward(output).kv_connector_output
        self.active.pre_forward(output)
        for layer in layers:
            self.active.kv_connector.wait_for_layer_load(layer)
            self._side.calls.append(f"attention {layer}")
            self.active.kv_connector.save_kv_layer(layer, None, None)
        self.active.finish_forward()
        return self.active.post_forward(set())


@pytest.fixture
def side() -> Recorder:
    return Recorder()


def make_connector(side: Recorder, *, on_gpu: bool) -> Any:
    from kvferry.adapters.vllm.connector import KvferryConnector
    from kvferry.adapters.vllm.loads import StepResults
    from kvferry.adapters.vllm.messages import RankReport
    from kvferry.adapters.vllm.metrics import Meter

    class Connector(KvferryConnector):
        def __init__(self) -> None:
            """With a worker half that is there already, so that no vLLM is needed around it."""
            self._connector_metadata = None
            self._worker, self._scheduler, self._pending_requests = make_half(side, on_gpu=on_gpu), None, None
            self._results, self._meter = StepResults(RankReport(0)), Meter(0)

        def register_kv_caches(self, kv_caches: Any) -> None:
            """It was."""

    side.statistics = dict  # type: ignore[attr-defined]
    return Connector()


@pytest.fixture
def on_gpu() -> bool:
    return False


@pytest.fixture
def runner(side: Recorder, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.forward_context import override_forward_context
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", make_connector(side, on_gpu=on_gpu))
    context: Any = SimpleNamespace()
    with override_forward_context(context):
        yield Runner(ActiveKVConnector(None, {}), side)


def test_layers_are_announced_as_they_come(runner: Runner, side: Recorder) -> None:
    runner.run(step())
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


@pytest.mark.parametrize("on_gpu", [True])
def test_on_a_gpu_layers_are_announced_as_the_stream_comes_to_them(runner: Runner, side: Recorder) -> None:
    runner.run(step())
    assert side.calls == [
        "withdraw plan",
        "attention a",
        "attention b",
        "stream is at 0",
        "start plan",
        "stream is at 1",
        "save_layer 0",
        "stream is at 2",
        "save_layer 1",
        "flush",
    ]


@pytest.mark.parametrize("on_gpu", [True])
def test_a_whole_cuda_graph_is_announced_at_its_end(runner: Runner, side: Recorder) -> None:
    """The calls around layers are not made then."""
    runner.run(step(), layers=())
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


def test_what_a_step_needs_is_loaded_before_it(runner: Runner, side: Recorder) -> None:
    runner.run(step(step_loads={"r": [3]}))
    assert side.calls[:3] == ["withdraw plan", "start plan", "wait_layer 0"]


def test_a_step_without_the_model(runner: Runner, side: Recorder) -> None:
    from kvferry.connectors.api import Loaded

    side.report.append(Loaded("r"))
    output = runner.run(step(computes=False, loads={"r": [5]}))
    assert side.calls == ["withdraw plan", "start plan"]
    assert output.finished_recving == {"r"}
    assert output.kv_connector_worker_meta is not None
    assert not runner.active.kv_connector.has_connector_metadata()


def test_a_dummy_run_calls_nothing(runner: Runner, side: Recorder) -> None:
    runner.active.set_disabled(True)
    assert runner.active.no_forward(SimpleNamespace(kv_connector_metadata=None)) is not None
    runner.active.set_disabled(False)
    assert side.calls == []
