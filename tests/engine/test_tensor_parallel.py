"""Two ranks answer as one does: real engines, real processes, float32 on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError, UnsupportedModel
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, SEEDED, random_prompts, require_same, run_prompts, run_requests
from support.pairs import pair_of

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

FAMILIES = {
    "llama": "split",
    "qwen3": "split",
    "mistral": "split",
    "gemma2": "split",
    "mixtral": "split",
    "phi3": "whole",
    "deepseek_v3": "whole",
}
"""What transformers' plan does with the KV heads."""


@contextmanager
def engine(model: Path, num_ranks: int, **settings: Any) -> Iterator[Engine]:
    """Small steps, so that prompts are prefilled in several chunks."""
    defaults = {"block_size": 8, "kv_cache_memory": "8MiB", "max_num_batched_tokens": 24, "max_num_seqs": 16}
    config = {"model": str(model), "dtype": "float32", "device": "cpu", "tensor_parallel_size": num_ranks}
    made = Engine(EngineConfig(**{**config, **defaults, **settings}))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in ("llama", "phi3") else pytest.mark.full) for one in FAMILIES]
)
def test_two_ranks_answer_as_one(family: str, model_maker: Any) -> None:
    model = model_maker(family)
    with engine(model, 1) as alone:
        prompts = random_prompts(12, alone.model.vocab_size, longest=60, block_size=8, seed=4)
        expected = [run_prompts(alone, prompts, sampling) for sampling in (GREEDY, SEEDED)]
        layers, fingerprint = alone.layout.layers, alone.model.fingerprint
    with engine(model, 2) as both:
        for answers, sampling in zip(expected, (GREEDY, SEEDED), strict=True):
            require_same(answers, run_prompts(both, prompts, sampling))
        both.check()
        assert both.statistics().scheduler.num_prefix_hits > 0
        assert both.model.fingerprint == fingerprint
        assert (both.layout.tp_size, both.layout.tp_rank) == (2, 0)
        for ours, whole in zip(both.layout.layers, layers, strict=True):
            assert ours.model_kv_heads == whole.num_kv_heads
            assert ours.num_kv_heads == whole.num_kv_heads // (2 if FAMILIES[family] == "split" else 1)


def test_preemption_and_prompt_logprobs_change_nothing(model_maker: Any) -> None:
    model = model_maker("llama")
    asking = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    answers = []
    for num_ranks in (1, 2):
        with engine(model, num_ranks, kv_cache_memory=str(14 * 8 * 3 * 2 * 32 * 4)) as one:
            prompts = random_prompts(20, one.model.vocab_size, longest=50, block_size=8, seed=7)
            found = run_prompts(one, prompts, GREEDY)
            logprobs = run_requests(one, [Request(request_id="p", prompt_token_ids=prompts[0], sampling=asking)])
            assert one.executor.num_blocks == 14
            assert one.statistics().scheduler.num_preemptions > 0
            one.check()
            last = logprobs["p"].last
            assert last is not None
            answers.append((found, last.prompt_logprobs))
    require_same(answers[0][0], answers[1][0])
    for left, right in zip(answers[0][1] or [], answers[1][1] or [], strict=True):
        assert left is right is None or (left and right and abs(left.logprob - right.logprob) < 1e-4)


def test_each_rank_holds_its_share_and_nothing_is_left_in_the_end(model_maker: Any) -> None:
    def num_held(one: Engine) -> int:
        return sum(
            weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()
            for weight in one.model.module.parameters()
            if weight.device.type != "meta"
        ) + sum(buffer.numel() for name, buffer in one.model.module.named_buffers() if name.endswith("packed"))

    model = model_maker("llama")
    with engine(model, 1) as alone:
        whole = num_held(alone)
    with engine(model, 2) as both:
        assert num_held(both) < 0.6 * whole
        [pid] = both.executor.pids  # type: ignore[attr-defined]
    assert not Path(f"/proc/{pid}").exists()
    with engine(model, 2) as again:  # the process may be a rank once more
        run_prompts(again, [[1, 2, 3]], GREEDY)


def test_what_cannot_be_shared_is_refused_before_anything_starts(model_maker: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="4 attention heads and 2 KV heads, which 3 ranks"):
        with engine(model_maker("llama"), 3):
            pass
    with pytest.raises(ConfigError, match="there is no directory"):
        with engine(tmp_path / "nothing", 2):
            pass
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be at least 1"):
        EngineConfig(model="m", tensor_parallel_size=0)


def test_an_error_of_another_rank_is_told_as_it_is(model_maker: Any) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 1 is not between 2"):
        with engine(model_maker("llama"), 2, max_model_len=1):
            pass


def test_a_process_is_a_rank_of_one_instance(model_maker: Any) -> None:
    model = model_maker("llama")
    with engine(model, 2) as first:
        with pytest.raises(ConfigError, match="already; give each a process of its own"):
            with engine(model, 2):
                pass
        assert len(run_prompts(first, [[1, 2, 3]], GREEDY)[0].tokens) == GREEDY.max_tokens


@pytest.mark.parametrize("family", ["llama", pytest.param("phi3", marks=pytest.mark.full)])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_hand_offs_between_one_rank_and_two(prefill: int, decode: int, family: str, model_maker: Any) -> None:
    model = model_maker(family)
    with engine(model, 1) as alone:
        prompts = random_prompts(8, alone.model.vocab_size, longest=70, block_size=8, seed=9)
        expected = {sampling.temperature: run_prompts(alone, prompts, sampling) for sampling in (GREEDY, SEEDED)}
    with pair_of(
        model,
        "P2pConnector",
        extra={},
        prefill={"block_size": 8, "max_num_batched_tokens": 16, "tensor_parallel_size": prefill},
        decode={"block_size": 8, "tensor_parallel_size": decode},
    ) as pair:
        require_same(expected[GREEDY.temperature], pair.run(prompts, GREEDY, "sequential"))
        require_same(expected[SEEDED.temperature], pair.run(prompts, SEEDED, "concurrent"))
        pair.settle()
        loads = pair.decode.statistics().external_kv
        assert loads.num_load_failures == {}
        assert loads.num_external_hits > 0.5 * sum(map(len, prompts))  # the KV came, it was not recomputed


def test_a_ticket_that_forgets_ranks_is_refused_and_recomputed(model_maker: Any) -> None:
    """Read as if rank 0 were all there is, half of the heads would be missing: wrong tokens. The seal tells of it."""
    model = model_maker("llama")
    settings = {"block_size": 8, "max_num_batched_tokens": 16}
    with engine(model, 1) as alone:
        prompts = random_prompts(4, alone.model.vocab_size, longest=70, block_size=8, seed=9)
        expected = run_prompts(alone, prompts, GREEDY)
    with pair_of(
        model, "P2pConnector", extra={}, prefill={**settings, "tensor_parallel_size": 2}, decode=settings
    ) as pair:
        first = pair.prefill.addresses[:1]
        require_same(expected, pair.run(prompts, GREEDY, "concurrent", must_load=False, addresses=first))
        assert pair.decode.statistics().external_kv.num_load_failures == {"AuthenticationFailed": len(prompts)}


def test_two_ranks_share_a_kv_store(model_maker: Any, tmp_path: Path) -> None:
    """Each rank keeps its own share; a later instance of two ranks finds both."""
    model = model_maker("llama")
    config = KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    settings = EngineConfig(
        model=str(model), dtype="float32", device="cpu", block_size=8, kv_cache_memory="8MiB", tensor_parallel_size=2
    )
    answers, hits = [], []
    for _ in range(2):
        one = Engine(settings, config)
        try:
            prompts = random_prompts(8, one.model.vocab_size, longest=70, block_size=8, seed=9)
            answers.append(run_prompts(one, prompts, GREEDY))
            one.check()
            statistics = one.statistics().external_kv
            hits.append((statistics.num_external_hits, statistics.num_load_failures))
        finally:
            one.close()
    require_same(*answers)
    assert hits[0] == (0, {})
    assert hits[1][0] > 0
    assert hits[1][1] == {}
