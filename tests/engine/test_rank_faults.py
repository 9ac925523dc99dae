"""Something raises within a step on some ranks of an instance: where all come out of it, only its requests end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import RankLost, RequestError
from kvferry.core.messages.hand_off import Produce
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.executor.rank_options import RankOptions
from kvferry.testing.stepping import IdleWait
from support import raising_connector
from support.engines import Answer, run_requests

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * place) % 90 + 1 for place in range(30)]


@pytest.fixture
def engine(model_maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Of two ranks."""
    monkeypatch.setenv(raising_connector.FOLDER, str(tmp_path))
    made = Engine(
        EngineConfig(
            model=str(model_maker("llama")),
            dtype="float32",
            device="cpu",
            block_size=8,
            kv_cache_memory="8MiB",
            tensor_parallel_size=2,
        ),
        KVTransferConfig(
            kv_connector="RaisingConnector",
            kv_connector_module_path="support.raising_connector",
            kv_role="kv_both",
            kv_connector_extra_config={"transport": "shm"},
        ),
        auth_token="test",
        ranks=RankOptions(skew_s=1.0),
    )
    yield made
    made.close()


def request(name: str, hand_off: Produce | None = None) -> Request:
    return Request(request_id=name, prompt_token_ids=PROMPT, sampling=SHORT, hand_off=hand_off)


def run(engine: Engine, name: str) -> tuple[Answer, Answer]:
    """One that is handed off, so that its step has a plan, and then one that is not; nothing is left of them."""
    made = request(f"{name}-made", Produce(name))
    [first] = run_requests(engine, [made]).values()
    engine.release(name)
    rest = IdleWait(engine)
    while engine.has_work or engine.scheduler.external_kv.statistics().num_held:
        engine.step()
        rest()
    [second] = run_requests(engine, [request(f"{name}-plain")]).values()
    engine.check()
    return first, second


def test_a_fault_that_all_ranks_survive_ends_its_requests(engine: Engine) -> None:
    expected = [answer.tokens for answer in run(engine, "whole")]
    survived = [(call, on) for call in ("withdraw", "start", "flush") for on in ([0], [1], [0, 1])]
    for call, on in [*survived, ("wait_layer", [0, 1])]:
        engine.pool.forget_all()
        raising_connector.ask(call, on)
        first, second = run(engine, f"{call}-{on}")
        assert raising_connector.left() == []
        assert first.last is not None
        assert isinstance(first.last.error, RequestError), (call, on)
        assert "out of cheese" in str(first.last.error)
        assert second.tokens == expected[1], (call, on)
    assert [answer.tokens for answer in run(engine, "again")] == expected


@pytest.mark.parametrize(("rank", "told"), [(0, "rank 0 failed in a step"), (1, "rank 1 .* failed: Raised")])
def test_a_rank_that_leaves_others_in_a_collective_ends_the_engine(engine: Engine, rank: int, told: str) -> None:
    raising_connector.ask("save_layer", [rank])
    with pytest.raises(RankLost, match=told):
        run(engine, "lost")
