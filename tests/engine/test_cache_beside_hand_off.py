"""A hand-off with a cache behind it, by one line for P and D: both keep what they have, and find it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, random_prompts, require_same, run_prompts
from support.pairs import Pair

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "max_num_seqs": 16, "block_size": 8,
}  # fmt: skip


def engine_of(model: Path, role: str, folder: Path, order: int) -> Engine:
    """With a cache of its own."""
    cache = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": f"file:{folder}"}}
    children = [{"kv_connector": "P2pConnector"}, cache]
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,  # type: ignore[arg-type]
        kv_connector_extra_config={"connectors": children[:: -1 if order else 1]},
    )
    return Engine(EngineConfig(model=str(model), prefix_caching=False, **SETTINGS), config, auth_token="test")


@pytest.mark.parametrize(("form", "order"), [("sequential", 0), ("concurrent", 1)])
def test_both_keep_what_they_have_and_find_it_again(model_maker: Any, tmp_path: Path, form: str, order: int) -> None:
    model = model_maker("llama")
    alone = Engine(EngineConfig(model=str(model), **SETTINGS))
    prompts = random_prompts(8, alone.model.vocab_size, longest=64, block_size=8, seed=6)
    expected = run_prompts(alone, prompts, GREEDY)
    alone.close()
    num_blocks = len({tuple(prompt[: 8 * end]) for prompt in prompts for end in range(1, len(prompt) // 8 + 1)})
    for again in (False, True):
        prefill = engine_of(model, "kv_producer", tmp_path / "p", order)
        decode = engine_of(model, "kv_consumer", tmp_path / "d", order)
        try:
            pair = Pair(prefill, decode)
            require_same(expected, pair.run(prompts, GREEDY, form))
            pair.settle()
            assert (prefill.statistics().external_kv.num_external_hits > 0) == again, "P had it in its cache"
            if again:  # D serves a prompt by itself, as for a client that asks it directly
                before = decode.statistics().external_kv.num_external_hits
                require_same(expected, run_prompts(decode, prompts, GREEDY))
                assert decode.statistics().external_kv.num_external_hits > before, "D had it in its cache"
        finally:
            decode.close()
            prefill.close()
        for name in "pd":
            assert len(list((tmp_path / name).rglob("*.kv"))) == num_blocks, name
