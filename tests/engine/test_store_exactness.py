"""KV from stores of every kind, in lists of tiers, far too small, written by two engines at once, or handed off through
them: the tokens of one engine alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.store.upkeep import verify
from support.engines import GREEDY, SEEDED, random_prompts, require_same, run_prompts, run_side_by_side
from support.pairs import pair_of

NUM_PROMPTS = 24
BLOCK_SIZE = 8
FULL = pytest.mark.full
Extra = Callable[[Path, str], dict[str, Any]]
STORES: dict[str, tuple[str, Extra]] = {
    "memory": ("OffloadingConnector", lambda folder, url: {"cpu_bytes_to_use": "32MiB"}),
    "memory far too small": ("OffloadingConnector", lambda folder, url: {"num_cpu_blocks": 12, "block_size": 16}),
    "file far too small": (
        "SharedStorageConnector",
        lambda folder, url: {"shared_storage_path": str(folder), "max_bytes": "200kB", "eviction_policy": "s3fifo"},
    ),
    "file": ("KVStoreConnector", lambda folder, url: {"store": f"file:{folder}", "load": "layerwise"}),
    "valkey": ("KVStoreConnector", lambda folder, url: {"store": url}),
    "lmcache": (
        "LMCacheConnector",
        lambda folder, url: {"lmcache.local_cpu": False, "lmcache.remote_url": url, "timeout_s": 120.0},
    ),
    "tiers": (
        "KVStoreConnector",
        lambda folder, url: {
            "store": ["memory:?num_blocks=20", f"file:{folder}?max_bytes=1MB", url],
            "write": "through",
        },
    ),
    "tiers, back": (
        "KVStoreConnector",
        lambda folder, url: {"store": ["memory:?num_blocks=400", f"file:{folder}"], "write": "back"},
    ),
    "hand-off and memory": (
        "MultiConnector",
        lambda folder, url: {
            "connectors": [
                {"kv_connector": "P2pConnector"},
                {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"num_cpu_blocks": 40}},
            ]
        },
    ),
}
SHORT = ("memory far too small", "tiers", "hand-off and memory")
CASES = [name if name in SHORT else pytest.param(name, marks=FULL) for name in STORES]


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> dict[str, Any]:
    """What one engine without a connector answers, with the prompts."""
    model = model_maker("llama")
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB"))
    prompts = random_prompts(NUM_PROMPTS, engine.model.vocab_size, longest=110, block_size=BLOCK_SIZE, seed=4)
    answers = {"greedy": run_prompts(engine, prompts, GREEDY), "seeded": run_prompts(engine, prompts, SEEDED)}
    engine.close()
    return {"model": model, "prompts": prompts, **answers}


def extra_of(name: str, folder: Path, request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    connector, extra = STORES[name]
    url = request.getfixturevalue("valkey_url") if name in ("valkey", "tiers") else ""
    if name == "lmcache":
        url = f"lm://127.0.0.1:{request.getfixturevalue('lmcache_port')}"
    return connector, extra(folder, url)


def engine_of(
    model: Path, connector: str, extra: dict[str, Any], block_size: int = BLOCK_SIZE, prefix_caching: bool = True
) -> Engine:
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", kv_cache_memory="8MiB", block_size=block_size,
        max_num_batched_tokens=40, max_num_seqs=16, prefix_caching=prefix_caching,
    )  # fmt: skip
    return Engine(config, KVTransferConfig(kv_connector=connector, kv_connector_extra_config=extra))


@pytest.mark.parametrize("name", CASES)
def test_what_is_reused_is_what_was_computed(
    name: str, alone: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    connector, extra = extra_of(name, tmp_path, request)
    with (
        closing(engine_of(alone["model"], connector, extra)) as first,
        closing(engine_of(alone["model"], connector, extra)) as second,
    ):
        for answers in run_side_by_side([first, second], alone["prompts"]):
            require_same(alone["greedy"], answers)
        require_same(alone["seeded"], run_prompts(second, alone["prompts"], SEEDED))
        with closing(engine_of(alone["model"], connector, extra)) as third:
            require_same(alone["greedy"], run_prompts(third, alone["prompts"], GREEDY))
            figures = third.statistics().external_kv
            assert figures.num_external_hits > 0, "nothing came from the store"


@pytest.mark.parametrize("form", [pytest.param("sequential", marks=FULL), "concurrent"])
@pytest.mark.parametrize("name", CASES)
def test_hand_offs_through_it(
    name: str, form: str, alone: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    connector, extra = extra_of(name, tmp_path, request)
    settings = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 40}
    with pair_of(alone["model"], connector, extra=extra, prefill=settings, decode={"block_size": BLOCK_SIZE}) as pair:
        require_same(alone["greedy"], pair.run(alone["prompts"], GREEDY, form, must_load="far too small" not in name))
        pair.settle()


@pytest.mark.parametrize("kind", ["file", pytest.param("valkey", marks=FULL), pytest.param("memory", marks=FULL)])
def test_engines_with_other_codecs_and_layouts_in_one_place(
    kind: str, alone: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each finds what its own kind wrote, and takes nobody else's for damaged."""
    place = {"file": f"file:{tmp_path}", "memory": "memory:16MiB"}.get(kind) or request.getfixturevalue("valkey_url")
    query = f"name={tmp_path.name}" if kind == "memory" else "max_bytes=16MiB"
    extras = [{"store": f"{place}?{query}&codec={codec}"} for codec in ("none", "lossless", "none")]
    sizes = (BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE)
    with ExitStack() as stack:
        engines = []
        for extra, size in zip(extras, sizes, strict=True):
            engine = engine_of(alone["model"], "KVStoreConnector", extra, block_size=size, prefix_caching=False)
            engines.append(stack.enter_context(closing(engine)))
        for _ in range(2):
            for answers in run_side_by_side(engines, alone["prompts"]):
                require_same(alone["greedy"], answers)
        for engine in engines:
            assert engine.statistics().external_kv.num_external_hits > 0
            assert engine.statistics().connector.get("corrupt_blocks", 0) == 0
            engine.check()
    if kind == "file":
        assert not verify(tmp_path).removed
