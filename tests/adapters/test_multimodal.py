"""Images and sounds: the KV of a prompt with one is used for prompts with the same content of it, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import PromptMaker, connector
from support import multimodal
from support.vllm_process import Answer, VllmProcess, early_ticket

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(400)]

NUM_TOKENS = 8
SEEDS = count(1)
"""Of images and sounds: each is another one."""


@dataclass(frozen=True)
class Family:
    """A kind of model. `modality`: what it takes; `make`: makes one; `item`: an input from a seed; `mark`: the tokens
    of a prompt that stand for an input, if any."""

    modality: str
    make: Callable[[Path], Path]
    item: Callable[[int], Any]
    mark: tuple[int, ...] = ()

    def last_match(self, prompt: list[int], *seeds: int) -> dict[str, Any]:
        """A prompt with these inputs, in the middle of it where the family has them there."""
        middle = len(prompt) // 2
        marked = [*prompt[:middle], *(self.mark * len(seeds)), *prompt[middle:]]
        items = [self.item(seed) for seed in seeds]
        return {"prompt": marked, "multi_modal_data": {self.modality: items}}


FAMILIES = {
    "blip2": Family("image", multimodal.make_blip2, multimodal.image),
    "qwen2_audio": Family("audio", multimodal.make_qwen2_audio, multimodal.sound, (4101, 4100, 4102)),
}


@dataclass
class Started:
    """Two that hand off to each other and share a store, and a plain one. `one` computes prompts in chunks that end
    within images and sounds."""

    family: Family
    one: VllmProcess
    two: VllmProcess
    plain: VllmProcess

    def right(self, asked: dict[str, Any]) -> list[int]:
        """The answer of the plain one."""
        return self.plain.run(max_tokens=NUM_TOKENS, **asked).token_ids

    def used(self) -> tuple[float, float]:
        """Hand-offs and loads from the store, of `two`."""
        figures = self.two.settled().figures
        return figures["taken"], figures["loads"]


@pytest.fixture(scope="module", params=["blip2", pytest.param("qwen2_audio", marks=pytest.mark.full)])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = family.make(folder / "model")
    store = connector("KvferrySharedStorageConnector", shared_storage_path=str(folder / "store"), hand_off=False)
    config = connector("MultiConnector", connectors=[connector("KvferryP2pConnector"), store])
    with ExitStack() as stack:

        def start(transfer: dict[str, Any] | None = None, **engine_args: Any) -> VllmProcess:
            process = VllmProcess(model, transfer, max_model_len=2048, **engine_args)
            stack.callback(process.close)
            return process

        one, two = start(config, max_num_batched_tokens=64), start(config)
        plain = start(enable_prefix_caching=False)
        yield Started(family, one.ready(), two.ready(), plain.ready())


def stored_and_found(started: Started, first: dict[str, Any], then: dict[str, Any]) -> Answer:
    """The answer of `two`, which may find what `one` has stored."""
    started.one.run(max_tokens=NUM_TOKENS, **first)
    started.one.settled()
    return started.two.run(max_tokens=NUM_TOKENS, **then)


def handed_off(started: Started, first: dict[str, Any], then: dict[str, Any]) -> Answer:
    """The answer of `two` with what it gets from `one` by a ticket."""
    ticket = started.one.prefill(transfer_id=f"t{hash(tuple(first['prompt']))}", **first)
    return started.two.run(max_tokens=NUM_TOKENS, params=ticket, **then)


def handed_off_together(started: Started, first: dict[str, Any], then: dict[str, Any]) -> Answer:
    """The same, where `two` asks before `one` has begun."""
    transfer_id = f"e{hash(tuple(first['prompt']))}"
    ticket = early_ticket(started.one, started.two, transfer_id)
    name = started.two.add(max_tokens=NUM_TOKENS, params=ticket, **then)
    started.one.prefill(transfer_id=transfer_id, **first)
    return started.two.wait(name)


WAYS = pytest.mark.parametrize("way", [stored_and_found, handed_off, handed_off_together])


@WAYS
def test_the_same_content_is_used(way: Any, started: Started, prompt_of: PromptMaker) -> None:
    prompt, before = prompt_of(200), started.used()
    asked = started.family.last_match(prompt, next(SEEDS))
    assert way(started, asked, asked).token_ids == started.right(asked)
    which = 1 if way is stored_and_found else 0
    assert started.used()[which] == before[which] + 1


@WAYS
def test_other_content_in_its_place_is_not_used(way: Any, started: Started, prompt_of: PromptMaker) -> None:
    prompt, before = prompt_of(200), started.used()
    first, then = started.family.last_match(prompt, next(SEEDS)), started.family.last_match(prompt, next(SEEDS))
    assert way(started, first, then).token_ids == started.right(then) != started.right(first)
    assert started.used() == before


@WAYS
def test_a_name_that_a_client_gives_to_two_of_them(way: Any, started: Started, prompt_of: PromptMaker) -> None:
    """vLLM itself believes it (`multi_modal_uuids`), and two instances may have seen other things under it."""
    prompt, before = prompt_of(200), started.used()
    named = {"multi_modal_uuids": {started.family.modality: [f"mine {way.__name__}"]}}
    first, then = started.family.last_match(prompt, next(SEEDS)), started.family.last_match(prompt, next(SEEDS))
    assert way(started, first | named, then | named).token_ids == started.right(then)
    assert started.used() == before


def test_many_at_once(started: Started, prompt_of: PromptMaker) -> None:
    """Of the same few prompts with different images or sounds, in both forms of a hand-off."""
    prompts = [prompt_of(length) for length in (20, 60, 150)]
    asked = [started.family.last_match(prompt, seed) for seed in islice(SEEDS, 4) for prompt in prompts]
    before = started.used()[0]
    right = [started.right(one) for one in asked]
    early = [early_ticket(started.one, started.two, f"many-{index}") for index in range(0, len(asked), 2)]
    names = [
        started.two.add(max_tokens=NUM_TOKENS, params=ticket, **one)
        for one, ticket in zip(asked[::2], early, strict=True)
    ]
    produce = {"do_remote_decode": True}
    made = [
        started.one.add(max_tokens=1, params=produce | {"transfer_id": f"many-{index}"}, **one)
        for index, one in enumerate(asked)
    ]
    tickets = [started.one.wait(name).kv_transfer_params for name in made][1::2]
    names += [
        started.two.add(max_tokens=NUM_TOKENS, params=ticket, **one)
        for one, ticket in zip(asked[1::2], tickets, strict=True)
    ]
    assert [started.two.wait(name).token_ids for name in names] == right[::2] + right[1::2]
    assert started.used()[0] == before + len(asked)
    started.one.settled()


def test_several_of_them_and_one_at_the_very_end(started: Started, prompt_of: PromptMaker) -> None:
    """D computes the last token itself, which is then of a sound."""
    if not started.family.mark:
        pytest.skip("of this family a prompt has one image, at its beginning")
    asked, before = started.family.last_match(prompt_of(100), *islice(SEEDS, 2)), started.used()[0]
    asked["prompt"] += [4101, 4100]
    asked["multi_modal_data"][started.family.modality].append(started.family.item(next(SEEDS)))
    assert handed_off(started, asked, asked).token_ids == started.right(asked)
    assert handed_off_together(started, asked, asked).token_ids == started.right(asked)
    swapped = asked | {"multi_modal_data": {"audio": asked["multi_modal_data"]["audio"][::-1]}}
    assert handed_off(started, asked, swapped).token_ids == started.right(swapped) != started.right(asked)
    assert started.used()[0] == before + 2
