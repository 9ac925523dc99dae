"""Hand-offs through a server that is killed while some are under way: every answer is as one engine's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, random_prompts, require_same, run_prompts
from support.pairs import pair_of
from support.valkey_server import BINARIES, ValkeyServer, server_binary

SETTINGS: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 40}


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_the_server_is_killed_on_the_way(model_maker: Any, form: str) -> None:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    model = model_maker("llama")
    alone = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="16MiB"))
    prompts = random_prompts(24, alone.model.vocab_size, longest=90, block_size=8, seed=3)
    expected = run_prompts(alone, prompts, GREEDY)
    alone.close()
    server = ValkeyServer()
    extra = {"store": server.url, "timeout_s": 1.0}
    try:
        with pair_of(model, "KVStoreConnector", extra=extra, prefill=SETTINGS, decode=SETTINGS) as pair:
            kill = kill_after(6, server)
            require_same(expected, pair.run(prompts, GREEDY, form, must_load=False, on_step=kill))
            assert server.process.poll() is not None
            assert sum(pair.decode.statistics().external_kv.num_load_failures.values()) > 0
            server.start()
            require_same(expected, pair.run(prompts, GREEDY, form, must_load=False))
            pair.settle()
    finally:
        server.close()


def kill_after(num_steps: int, server: ValkeyServer) -> Callable[[], None]:
    """In the middle of the prefills: called before each step, it kills the server at the last of these."""
    steps = iter(range(1, num_steps + 1))

    def count() -> None:
        if next(steps, None) == num_steps:
            server.kill()

    return count
