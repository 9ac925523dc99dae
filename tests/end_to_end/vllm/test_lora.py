"""LoRA adapters of two vLLM servers behind a router. An adapter is known by its content: KV computed with it is handed
off whatever its path is, and not at all if D has other weights under the same name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.models.catalog import resolve
from support.lora import write_adapter
from support.processes import KvferryProcess
from support.vllm_servers import (
    MODEL,
    Server,
    answers,
    held,
    prompts,
    require_nothing_kept,
    router_before,
    vllm_servers,
)
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

METRIC = "vllm:kvferry_p2p_connector"
P2P = {"kv_connector": "P2pConnector"}
ON_P, ON_D = {"same": 7, "differs": 8, "replaced": 10}, {"same": 7, "differs": 9, "replaced": 10}
"""The weights of the adapters of each name, as seeds."""


@dataclass
class Started:
    """P, D, the folder with P's adapters, and routers that call P and D one after the other and together."""

    prefill: KvferryProcess
    decode: KvferryProcess
    folder: Path
    routers: dict[str, KvferryProcess]

    def handed_off(self) -> tuple[float, float]:
        """Hand-offs that D has taken, and those that it has asked for. vLLM tells a connector's figures with a step, so
        it is given one to make."""
        held(self.decode.url)
        return self.decode.metric(METRIC + "_taken_total"), self.decode.metric(METRIC + "_fetches_total")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("lora")
    pair = {
        "prefill": Server("prefill", P2P, serving(folder / "p", ON_P)),
        "decode": Server("decode", P2P, serving(folder / "d", ON_D)),
    }
    with vllm_servers(folder, **pair) as servers:
        both = servers["prefill"], servers["decode"]
        with (
            router_before(folder, *both) as sequential,
            router_before(folder, *both, "--hand-off=concurrent") as concurrent,
        ):
            yield Started(*both, folder / "p", {"sequential": sequential, "concurrent": concurrent})


def serving(folder: Path, adapters: dict[str, int]) -> tuple[str, ...]:
    """vLLM's arguments for adapters of these names and seeds, written into `folder`."""
    model = Path(resolve(MODEL))
    paths = [f"{name}={write_adapter(folder / name, seed, model)}" for name, seed in adapters.items()]
    return ("--enable-lora", "--max-loras=2", "--max-cpu-loras=4", "--max-lora-rank=8", "--lora-modules", *paths)


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_the_same_weights_are_handed_off(form: str, started: Started) -> None:
    asked = prompts(count=12, longest=600, seed=11)
    right = answers(started.decode.url, asked, model="same", cache_salt="alone")
    assert right != answers(started.decode.url, asked, cache_salt="alone")
    before = started.handed_off()
    found = answers(started.routers[form].url, asked, model="same", cache_salt=form)
    assert found == right
    until(lambda: started.handed_off()[0] - before[0] == len(asked), 20, started.decode.log)
    require_nothing_kept(started.prefill, started.decode)


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_other_weights_under_the_same_name_are_not_loaded(form: str, started: Started) -> None:
    """D computes the prompt with its own."""
    asked = prompts(count=12, longest=600, seed=12)
    right = answers(started.decode.url, asked, model="differs", cache_salt="alone")
    assert right != answers(started.prefill.url, asked, model="differs", cache_salt="alone")
    before = started.handed_off()
    found = answers(started.routers[form].url, asked, model="differs", cache_salt=form)
    assert found == right
    assert started.handed_off()[0] == before[0]
    require_nothing_kept(started.prefill, started.decode)


def test_adapters_in_one_batch(started: Started) -> None:
    """Requests for both at once, for the same prompts, with those for the base model between them, which vLLM for CPUs
    then computes with one of the adapters (`salts.computes_base_with_adapters`)."""
    asked = prompts(count=12, longest=600, seed=13)
    right = {name: answers(started.decode.url, asked, model=name, cache_salt="alone") for name in ON_D}
    before = started.handed_off()
    with ThreadPoolExecutor() as pool:
        url = started.routers["concurrent"].url
        found = {name: pool.submit(answers, url, asked, model=name) for name in (*ON_D, "m")}
    assert {name: found[name].result() for name in ON_D} == right
    until(lambda: started.handed_off()[0] - before[0] == 2 * len(asked), 20, started.decode.log)
    require_nothing_kept(started.prefill, started.decode)


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_files_that_are_replaced_while_p_serves_them_end_their_hand_offs(form: str, started: Started) -> None:
    """P computes with what it has loaded, which is on no disk anymore. Other adapters are not affected."""
    asked = prompts(count=12, longest=600, seed=14)
    right = answers(started.decode.url, asked, model="replaced", cache_salt="alone")
    if form == "sequential":
        assert answers(started.routers[form].url, asked, model="replaced", cache_salt="before") == right
        write_adapter(started.folder / "new", 11, Path(resolve(MODEL)))
        for path in (started.folder / "new").iterdir():
            shutil.move(path, started.folder / "replaced" / path.name)
    before = started.handed_off()
    assert answers(started.routers[form].url, asked, model="replaced", cache_salt=form) == right
    assert started.handed_off()[0] == before[0]
    assert "its files have changed" in started.prefill.log
    require_nothing_kept(started.prefill, started.decode)
