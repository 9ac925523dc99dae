"""Ranks that the engine did not start, and that come over TCP: they answer as one, hand off, and are lost by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.test_rank_loss import SOON_S, bounded, run_until_lost
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.executor.rank_options import RankOptions
from support import warm
from support.certificates import member_options
from support.engines import GREEDY, random_prompts, require_same, run_prompts
from support.pairs import pair_of
from support.ports import free_port
from support.processes import is_running
from support.waiting import until

pytestmark = pytest.mark.processes

RANK = (
    "import sys; from kvferry.engine.executor.rank_main import run_rank; sys.exit(run_rank({address!r}, 'test', 100))"
)
"""As `kvferry rank` runs it. `pair_of` has this token."""


@contextmanager
def rank_coming(folder: Path) -> Iterator[tuple[dict[str, Any], warm.Program]]:
    """The settings of an engine of two ranks, and the process of rank 1, which ends with it."""
    address = f"127.0.0.1:{free_port()}"
    program = warm.Program(RANK.format(address=address), folder / "rank")
    try:
        yield {"tensor_parallel_size": 2, "ranks_at": address, "block_size": 8}, program
        until(lambda: not is_running(program.process.pid), SOON_S)
    finally:
        program.process.kill()


def two_ranks(model: Path, settings: dict[str, Any], ranks: RankOptions | None = None) -> Engine:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="4MiB", **settings)
    return Engine(config, auth_token="test", ranks=ranks)


def test_hand_offs_from_and_to_ranks_that_came(model_maker: Any, tmp_path: Path) -> None:
    model = model_maker("llama")
    one = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", block_size=8, kv_cache_memory="8MiB"))
    prompts = random_prompts(8, one.model.vocab_size, longest=70, block_size=8, seed=9)
    expected = run_prompts(one, prompts, GREEDY)
    one.close()
    with rank_coming(tmp_path) as (settings, _):
        more = {"extra": {}, "decode": {"block_size": 8}}
        with pair_of(model, "P2pConnector", prefill={**settings, "max_num_batched_tokens": 16}, **more) as pair:
            require_same(expected, run_prompts(pair.prefill, prompts, GREEDY))
            require_same(expected, pair.run(prompts, GREEDY, "sequential"))
            pair.settle()
            loads = pair.decode.statistics().external_kv
            assert loads.num_load_failures == {}
            assert loads.num_external_hits > 0.5 * sum(map(len, prompts))  # the KV came, it was not recomputed


def test_a_rank_that_is_killed_is_named(model_maker: Any, tmp_path: Path) -> None:
    with rank_coming(tmp_path) as (settings, rank):
        engine = two_ranks(model_maker("llama"), settings)
        os.kill(rank.process.pid, signal.SIGKILL)
        error = str(run_until_lost(engine))
        assert error.startswith(f"rank 1 (process {rank.process.pid} of ")
        assert error.endswith("on 127.0.0.1) closed its connection: its process has ended, or its machine is gone")
        assert bounded(engine.close) < SOON_S


def test_a_rank_that_stands_still_is_not_waited_for_for_ever(model_maker: Any, tmp_path: Path) -> None:
    """Who has started it ends it; this engine goes on without."""
    brief = RankOptions(step_s=1.0, answer_s=2.0, end_timeout_s=1.0)
    with rank_coming(tmp_path) as (settings, rank):
        engine = two_ranks(model_maker("llama"), settings, brief)
        os.kill(rank.process.pid, signal.SIGSTOP)
        assert "did not take part in time" in str(run_until_lost(engine))
        assert bounded(engine.close) < SOON_S
        os.kill(rank.process.pid, signal.SIGCONT)


def test_an_instance_whose_connections_are_to_be_encrypted_has_no_ranks_elsewhere(model_maker: Any) -> None:
    settings = EngineConfig(
        model=str(model_maker("llama")), device="cpu", tensor_parallel_size=2, ranks_at="127.0.0.1:7000"
    )
    extra = member_options()
    for config in (
        KVTransferConfig(kv_connector="P2pConnector", kv_connector_extra_config=extra),
        KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_extra_config={
                "connectors": [{"kv_connector": "P2pConnector", "kv_connector_extra_config": extra}]
            },
        ),
    ):
        with pytest.raises(ConfigError, match="--ranks-at: traffic between ranks is not encrypted"):
            Engine(settings, config, auth_token="test")
