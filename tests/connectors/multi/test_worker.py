"""Several worker sides as one: each measures, closes and keeps its stores right by itself."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeRequest
from several import HAND_OFF, PROMPT, MakeEngine, consumed, memory, settle, storage

from kvferry.connectors.multi.settings import child_configs
from kvferry.core.errors import LeakError, StoreError
from kvferry.core.messages.hand_off import Produce
from kvferry.core.settings.transfer_config import KVTransferConfig


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    def make(role: str, *children: dict[str, Any], **options: Any) -> FakeEngine:
        return make_engine("MultiConnector", role, connectors=list(children), **options)

    return make


SILENT = """
from folder_connector import *

class SilentScheduler(SchedulerSide[FolderPlan]):
    # None of the classes beside `SchedulerSide`.

    def __init__(self, context):
        super().__init__(context)
        self._side = FolderSchedulerSide(context)
        for name in ("match", "allocated", "plan", "completed", "finish", "has_work"):
            setattr(self, name, getattr(self._side, name))

    match = allocated = plan = completed = finish = None

Silent = ConnectorSpec(
    "silent:SilentScheduler", "folder_connector:FolderWorkerSide", 2, options="folder_connector:FolderOptions"
)
"""


@pytest.mark.parametrize("connector", ["folder_connector:FolderConnector", "silent:Silent"])
@pytest.mark.parametrize("order", [1, -1])
def test_another_package_s_connector_hands_off(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, order: int
) -> None:
    """Wherever it is in the list, with the role of the instance, also if it does not say that it does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "silent.py").write_text(SILENT)
    for name in ("folder_connector", "silent"):
        sys.modules.pop(name, None)
    folder = {"kv_connector": connector, "kv_connector_extra_config": {"folder": str(tmp_path)}}
    children = [memory("both"), folder][::order]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_producer", kv_connector_extra_config={"connectors": children}
    )
    assert [child.kv_role for child in child_configs(config)] == ["kv_both", "kv_producer"][::order]
    producer, consumer = make("kv_producer", *children), make("kv_consumer", *children)
    prefill = producer.run(FakeRequest("p", PROMPT, Produce("t")))
    assert prefill.ticket is not None
    decode = consumer.run(consumed(PROMPT, prefill.ticket))
    assert (decode.error, decode.num_computed_here) == (None, 0)
    consumer.require_right(decode)


def test_one_that_is_long_in_closing_holds_nobody_up(make: MakeEngine, tmp_path: Path) -> None:
    """But for the blocks that it may still write to."""
    engine = make("kv_both", storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    settle(engine, 0)
    settle(engine, 1)
    lost, may_end = engine.worker.children[0], threading.Event()
    close, start = lost.close, lost.start

    def close_late() -> None:
        assert may_end.wait(60)
        close()

    def begin_and_stumble(plan: Any) -> None:
        start(plan)
        raise StoreError("gone")

    lost.close, lost.start = close_late, begin_and_stumble
    request = engine.add(FakeRequest("b", PROMPT))
    engine.run_until(lambda: engine.worker.lost == {0})
    other = engine.run(FakeRequest("c", [*PROMPT[:4], *range(200, 220)]))
    engine.require_right(other)
    assert request.state == "loading"
    with pytest.raises(LeakError, match="not closed yet"):
        engine.worker.check()
    may_end.set()
    engine.run_until(lambda: request.state == "done")
    engine.require_right(request)


def test_a_load_that_fails_leaves_nothing_wrong_in_the_other_s_store(make: MakeEngine, tmp_path: Path) -> None:
    """With `auto` too, where a connector alone would load layer by layer."""
    alone = make("kv_both", storage(tmp_path / "a"))
    alone.run(FakeRequest("a", PROMPT))
    settle(alone, 0)
    for path in (tmp_path / "a").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    first = storage(tmp_path / "a")
    first |= {"kv_connector": "LayerwiseConnector", "kv_connector_module_path": "layerwise_connector"}
    first["kv_connector_extra_config"]["load"] = "auto"
    both = make("kv_both", first, storage(tmp_path / "b"), chunk=100)
    request = both.run(FakeRequest("b", PROMPT))
    assert isinstance(request.error, StoreError), "the damage showed"
    settle(both, 1)
    other = make("kv_both", storage(tmp_path / "b"))
    again = other.run(FakeRequest("c", PROMPT))
    assert (again.error, again.num_computed_here) == (None, 3)
    other.require_right(again)


def test_each_one_measures_how_fast_the_model_is(make: MakeEngine, tmp_path: Path) -> None:
    """Nothing is loaded meanwhile: a step is told to each, though nothing happened in it."""
    engine = make("kv_both", HAND_OFF, storage(tmp_path / "a"), storage(tmp_path / "b"))
    engine.run(FakeRequest("a", PROMPT))
    said = engine.scheduler.statistics()
    assert said["1_prefill_tokens_per_s"] > 0
    assert said["2_prefill_tokens_per_s"] > 0
