"""LoRA adapters: KV of an adapter is used by requests with the same content of it, whatever it is called."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from support.lora import write_adapter
from support.vllm_process import Answer, VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(400)]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 8}

Adapter = dict[str, Any]
"""The fields of a `LoRARequest`."""


@pytest.fixture(scope="module")
def both(start_vllm: VllmMaker, tmp_path_factory: pytest.TempPathFactory) -> tuple[VllmProcess, VllmProcess]:
    """Two that hand off to each other, and share a store."""
    store = connector("KvferrySharedStorageConnector", shared_storage_path=str(tmp_path_factory.mktemp("store")))
    store["kv_connector_extra_config"]["hand_off"] = False
    config = connector("MultiConnector", connectors=[connector("KvferryP2pConnector"), store])
    processes = [start_vllm(config, **LORA) for _ in range(2)]
    return processes[0].ready(), processes[1].ready()


@pytest.fixture(scope="module")
def right(start_vllm: VllmMaker, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    """`right(prompt, seed)`: the answer with the adapter of that seed."""
    alone = start_vllm(None, **LORA, enable_prefix_caching=False).ready()
    folder = tmp_path_factory.mktemp("right")

    def answer(prompt: list[int], seed: int) -> list[int]:
        path = write_adapter(folder / str(seed), seed, model)
        lora = {"lora_name": f"right-{seed}", "lora_int_id": seed, "lora_path": str(path)}
        return alone.run(prompt, 6, lora=lora).token_ids

    return answer


@pytest.fixture
def adapter(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Adapter]:
    """`adapter(seed, **fields)`: one in a folder of its own, with a new name and number."""
    numbers = request.config.stash.setdefault(NUMBERS, iter(range(1, 1000)))

    def make(seed: int, **fields: Any) -> Adapter:
        number = next(numbers)
        path = write_adapter(tmp_path / f"adapter-{number}", seed, model)
        return {"lora_name": f"a{number}", "lora_int_id": number, "lora_path": str(path)} | fields

    return make


NUMBERS = pytest.StashKey[Iterator[int]]()


def stored_and_found(one: VllmProcess, two: VllmProcess, prompt: list[int], first: Adapter, then: Adapter) -> Answer:
    """The answer of `two`, which may find what `one` has stored of the same prompt."""
    one.run(prompt, 6, lora=first)
    one.settled()
    return two.run(prompt, 6, lora=then)


def handed_off(one: VllmProcess, two: VllmProcess, prompt: list[int], first: Adapter, then: Adapter) -> Answer:
    """The answer of `two` with what it gets from `one` by a ticket. The store has it too."""
    ticket = one.prefill(prompt, f"t{hash(tuple(prompt))}", lora=first)
    return two.run(prompt, 6, ticket, lora=then)


WAYS = pytest.mark.parametrize("way", [stored_and_found, handed_off])


@WAYS
def test_the_same_content_is_used_whatever_it_is_called(
    way: Any, both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, prompt_of: PromptMaker
) -> None:
    prompt, before = prompt_of(200), both[1].settled().figures
    assert way(*both, prompt, adapter(7), adapter(7)).token_ids == right(prompt, 7)
    after = both[1].settled().figures
    assert (after["taken"] if way is handed_off else after["loads"]) > before["taken" if way is handed_off else "loads"]


@WAYS
def test_another_content_under_the_same_name_is_not_used(
    way: Any, both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, prompt_of: PromptMaker
) -> None:
    prompt, before = prompt_of(200), both[1].settled().figures
    first = adapter(7)
    then = adapter(8) | {"lora_name": first["lora_name"], "lora_int_id": first["lora_int_id"]}
    assert way(*both, prompt, first, then).token_ids == right(prompt, 8) != right(prompt, 7)
    after = both[1].settled().figures
    assert (after["taken"], after["loads"]) == (before["taken"], before["loads"])


def test_the_base_model_and_an_adapter_have_nothing_in_common(
    both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, prompt_of: PromptMaker
) -> None:
    one, two = both
    prompt = prompt_of(200)
    base = one.run(prompt, 6).token_ids
    one.settled()
    assert two.run(prompt, 6, lora=adapter(7)).token_ids == right(prompt, 7) != base
    two.settled()
    assert one.run(prompt, 6).token_ids == base


def test_the_base_model_in_one_batch_with_an_adapter(
    both: tuple[VllmProcess, VllmProcess], adapter: Any, prompt_of: PromptMaker
) -> None:
    """vLLM for CPUs computes it with the adapter then, and nobody else is to have that KV."""
    one, two = both
    prompt, loras = prompt_of(200), [adapter(7), adapter(8)]
    base = two.run(prompt, 6, cache_salt="alone").token_ids
    one.ask("freeze")
    names = [one.add(prompt, 6, lora=lora) for lora in (None, *loras)]
    one.ask("thaw")
    mixed = [one.wait(name).token_ids for name in names]
    one.settled()
    before = two.settled().figures["loads"]
    assert two.run(prompt, 6).token_ids == base
    if mixed[0] != base:  # a vLLM that computes it right may hand it on
        assert two.settled().figures["loads"] == before


# What is computed with is not what is on the disk. vLLM computes with what it has loaded.


def replace(lora: Adapter, seed: int, model: Path) -> None:
    """Put another adapter where this one is."""
    other = write_adapter(Path(lora["lora_path"]).with_name("other"), seed, model)
    for path in other.iterdir():
        path.replace(Path(lora["lora_path"]) / path.name)


@pytest.mark.parametrize("loaded", ["when asked to", "with the first request"])
def test_files_replaced_after_they_were_loaded_give_their_kv_no_name(
    loaded: str, both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, model: Path, prompt_of: PromptMaker
) -> None:
    one, two = both
    lora, prompt = adapter(7), prompt_of(200)
    if loaded == "when asked to":
        one.ask("load_adapter", **lora)
    else:
        one.run(prompt_of(40), 2, lora=lora)
    replace(lora, 8, model)
    assert one.run(prompt, 6, lora=lora).token_ids == right(prompt, 7), "vLLM has loaded it again"
    one.settled()
    other = adapter(8)
    before = two.settled().figures
    assert two.run(prompt, 6, lora=other).token_ids == right(prompt, 8), "from the store"
    answer = one.run(prompt, 1, {"do_remote_decode": True, "transfer_id": f"replaced {loaded}"[:8]}, lora=lora)
    assert answer.kv_transfer_params is None
    after = two.settled().figures
    assert (after["taken"], after["loads"]) == (before["taken"], before["loads"])


def test_files_replaced_while_a_request_waits(
    both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, model: Path, prompt_of: PromptMaker
) -> None:
    """It is computed with those that are there when it begins."""
    one, two = both
    lora, prompt = adapter(7), prompt_of(200)
    one.ask("freeze")
    name = one.add(prompt, 6, lora=lora)
    replace(lora, 8, model)
    one.ask("thaw")
    assert one.wait(name).token_ids == right(prompt, 8)
    one.settled()
    assert two.run(prompt, 6, lora=adapter(7)).token_ids == right(prompt, 7)


def test_an_adapter_that_was_loaded_in_place_has_no_name(
    both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, model: Path, prompt_of: PromptMaker
) -> None:
    one, two = both
    lora, prompt = adapter(7), prompt_of(200)
    one.run(prompt_of(40), 2, lora=lora)
    replace(lora, 8, model)
    anew = lora | {"load_inplace": True}
    one.ask("load_adapter", **anew)
    assert one.run(prompt, 6, lora=anew).token_ids == right(prompt, 8)
    one.settled()
    assert two.run(prompt, 6, lora=adapter(7)).token_ids == right(prompt, 7)


def test_an_adapter_loaded_in_place_from_another_path_is_what_is_there(
    both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, prompt_of: PromptMaker
) -> None:
    one, two = both
    old, prompt = adapter(7), prompt_of(200)
    new = old | {"lora_path": adapter(8)["lora_path"], "load_inplace": True}
    one.run(prompt_of(40), 2, lora=old)
    one.ask("load_adapter", **new)
    before = two.settled().figures["loads"]
    assert stored_and_found(one, two, prompt, new, adapter(8)).token_ids == right(prompt, 8)
    assert two.settled().figures["loads"] > before


def test_two_adapters_with_one_number_have_no_name(
    both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, prompt_of: PromptMaker
) -> None:
    """vLLM computes both with the one that it has loaded."""
    one, two = both
    first, prompt, later = adapter(7), prompt_of(200), prompt_of(200)
    second = adapter(8) | {"lora_int_id": first["lora_int_id"]}
    one.run(prompt_of(40), 2, lora=first)
    assert one.run(prompt, 6, lora=second).token_ids == right(prompt, 7)
    one.run(later, 6, lora=first)
    one.settled()
    before = two.settled().figures["loads"]
    assert two.run(prompt, 6, lora=adapter(8)).token_ids == right(prompt, 8)
    assert two.run(later, 6, lora=adapter(7)).token_ids == right(later, 7)
    assert two.settled().figures["loads"] == before


def test_what_has_no_name_is_said_once(
    both: tuple[VllmProcess, VllmProcess], adapter: Any, model: Path, prompt_of: PromptMaker
) -> None:
    one, _ = both
    lora = adapter(7)
    one.run(prompt_of(40), 2, lora=lora)
    replace(lora, 8, model)
    one.settled()
    for _ in range(3):
        one.run(prompt_of(80), 2, lora=lora)
    log = one.settled().log
    assert [line for line in log if lora["lora_name"] in line and "its files have changed" in line] == log[:1]


def test_a_copy_elsewhere_is_the_same(
    both: tuple[VllmProcess, VllmProcess], right: Any, adapter: Any, prompt_of: PromptMaker
) -> None:
    one, two = both
    lora, prompt = adapter(7), prompt_of(200)
    copy = Path(lora["lora_path"]).with_name("copy")
    shutil.copytree(lora["lora_path"], copy)
    (copy / "README.md").write_text("mine")
    before = two.settled().figures["loads"]
    elsewhere = adapter(7) | {"lora_path": str(copy)}
    assert stored_and_found(one, two, prompt, lora, elsewhere).token_ids == right(prompt, 7)
    assert two.settled().figures["loads"] > before
