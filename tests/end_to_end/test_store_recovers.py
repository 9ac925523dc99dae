"""A store that is down and comes back between two instances: no request has to find out that it is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ModelMaker
from support.processes import KvferryProcess, cluster
from support.valkey_server import BINARIES, ValkeyServer, server_binary
from support.waiting import until

pytestmark = pytest.mark.processes

HITS = "vllm:external_prefix_cache_hits_total"
BACK_S = 60.0
"""Far beyond the few seconds that it takes, for a machine that does much else."""


class Killed(ValkeyServer):
    begin, end = ValkeyServer.kill, ValkeyServer.start


class Full(ValkeyServer):
    def begin(self) -> None:
        assert self.say("CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"

    def end(self) -> None:
        assert self.say("CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"


def num_prefills(prefill: KvferryProcess) -> float:
    return prefill.metric("vllm:prompt_tokens_total")


@pytest.mark.parametrize("kind", [Killed, pytest.param(Full, marks=pytest.mark.full)])
def test_hand_offs_are_used_again_without_a_request_in_between(
    kind: type[Killed | Full], model_maker: ModelMaker, tmp_path: Path
) -> None:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    server = kind()
    transfer = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": server.url}}
    router = ("--health-interval-s=0.2", "--disaggregate-from=0", "--policy=round_robin")
    numbers = iter(range(1000))
    try:
        with cluster(model_maker("llama"), tmp_path, transfer=transfer, router=router) as started:
            (prefill,), (decode,), front = started.prefill, started.decode, started.router

            def ask() -> None:
                front.complete([next(numbers), *range(7, 90)])

            ask()
            assert decode.metric(HITS) > 0
            server.begin()

            def told() -> bool:
                ask()
                return "its stores take no KV" in front.log

            until(told, BACK_S, front.log)
            before = num_prefills(prefill)
            for _ in range(3):
                ask()
            assert num_prefills(prefill) == before, "D would have computed the prompts again"
            hits = decode.metric(HITS)
            server.end()
            until(lambda: "its stores take KV again" in front.log, BACK_S, prefill.log)
            assert num_prefills(prefill) == before
            ask()
            assert num_prefills(prefill) > before

            def fetched() -> bool:
                ask()
                return decode.metric(HITS) > hits

            until(fetched, BACK_S, decode.log)
            started.require_clean()
    finally:
        server.close()
