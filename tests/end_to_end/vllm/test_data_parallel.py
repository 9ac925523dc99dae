"""Data-parallel vLLM servers: each engine hands its KV off under an address of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support.processes import KvferryProcess
from support.vllm_servers import (
    Server,
    answers,
    held,
    prefilled,
    prompts,
    require_nothing_kept,
    router_before,
    vllm_servers,
)
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]

METRIC = "vllm:kvferry_p2p_connector"
P2P = {"kv_connector": "P2pConnector"}
TWO = ("--data-parallel-size", "2", "--api-server-count", "1")


@dataclass
class Started:
    """P and D with two engines each, and routers that call them one after the other and together."""

    prefill: KvferryProcess
    decode: KvferryProcess
    routers: dict[str, KvferryProcess]

    def taken(self) -> float:
        """Hand-offs that D has taken. vLLM tells a connector's figures with a step, so it is given one to make."""
        held(self.decode.url)
        return self.decode.metric(METRIC + "_taken_total")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("data-parallel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM wants a memory node for each engine otherwise
        with vllm_servers(folder, prefill=Server("prefill", P2P, TWO), decode=Server("decode", P2P, TWO)) as servers:
            both = servers["prefill"], servers["decode"]
            with (
                router_before(folder, *both) as sequential,
                router_before(folder, *both, "--hand-off=concurrent") as concurrent,
            ):
                yield Started(*both, {"sequential": sequential, "concurrent": concurrent})


def test_both_engines_hand_off(started: Started) -> None:
    """Each writes its own address into its tickets."""
    tickets = [prefilled(started.prefill.url, [number] * 100, f"both-{number}") for number in range(5, 13)]
    assert len({ticket["remote_port"] for ticket in tickets}) == 2
    assert len({ticket["remote_engine_id"] for ticket in tickets}) == 2
    for number, ticket in zip(range(5, 13), tickets, strict=True):
        prompt = [[number] * 100]
        alone = answers(started.decode.url, prompt, cache_salt="alone")
        assert answers(started.decode.url, prompt, kv_transfer_params=ticket) == alone
    until(lambda: started.taken() == len(tickets), 20, started.decode.log)
    require_nothing_kept(started.prefill, started.decode)


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_many_at_once(form: str, started: Started) -> None:
    asked = prompts(count=40, longest=900, seed=21)
    right = answers(started.decode.url, asked, cache_salt="alone")
    before = started.taken()
    assert answers(started.routers[form].url, asked, cache_salt=form) == right
    until(lambda: started.taken() - before == len(asked), 20, started.decode.log)
    assert not re.findall("hand-off not loaded.*", started.decode.log)
    require_nothing_kept(started.prefill, started.decode)
