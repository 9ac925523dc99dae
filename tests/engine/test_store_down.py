"""Hand-offs through a store that is killed, hangs, is full, slow, read-only or comes back empty: right and at once, and
through the store again soon after its recovery. `timeout_s` is far beyond what any of this may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, Answer, random_prompts, require_same, run_prompts
from support.pairs import Pair, pair_of
from support.troubled_stores import DISK_STATES, MOUNTED, ON_SERVER, SERVER_STATES, HeldUpDisk, OnDisk, OnServer

pytestmark = pytest.mark.short_deadlines

TIMEOUT_S = 300.0
AT_ONCE_S = 8.0
"""For a request beside a store that is down, on a machine that does other things as well."""
BACK_S = 60.0
NUM_DOWN = 3
BLOCK = {"block_size": 8}
SETTINGS = {"prefill": BLOCK, "decode": BLOCK}


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> tuple[Path, list[list[int]], list[Answer]]:
    """What one engine answers."""
    model = model_maker("llama")
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB"))
    prompts = [
        prompt
        for prompt in random_prompts(400, engine.model.vocab_size, longest=80, block_size=8, seed=4)
        if len(prompt) >= 40
    ]
    answers = run_prompts(engine, prompts, GREEDY)
    engine.close()
    return model, prompts, answers


CELLS = [(store, state) for store in ON_SERVER for state in SERVER_STATES] + [("disk", state) for state in DISK_STATES]


def place_of(store: str, state: str, folder: Path, stack: ExitStack) -> OnServer | OnDisk:
    if store != "disk":
        return OnServer(store, folder, stack, link=state == "slow")
    disk = HeldUpDisk()
    disk.install()
    stack.callback(disk.undo)
    return OnDisk(folder, stack, disk.set, mount=state in MOUNTED)


@contextmanager
def hand_offs(
    place: OnServer | OnDisk, alone: tuple[Path, list[list[int]], list[Answer]]
) -> Iterator[Callable[[], bool]]:
    """Each call hands a prompt off that nobody had before; returns whether its KV came through the store."""
    model, prompts, answers = alone
    rest = iter(zip(prompts, answers, strict=True))
    extra = {**place.extra, "timeout_s": TIMEOUT_S}

    def hand_off(pair: Pair) -> bool:
        prompt, expected = next(rest)
        before = pair.decode.statistics().external_kv.num_external_hits
        require_same([expected], pair.run([prompt], GREEDY, "sequential", must_load=False))
        return pair.decode.statistics().external_kv.num_external_hits > before

    with pair_of(model, place.connector, extra=extra, **SETTINGS) as pair:
        yield lambda: hand_off(pair)
        pair.settle()


@pytest.mark.parametrize(("store", "state"), CELLS)
def test_a_store_in_trouble(store: str, state: str, alone: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        place = place_of(store, state, tmp_path, stack)
        with hand_offs(place, alone) as hand_off:
            assert hand_off()
            place.trouble(state)
            served = []
            for _ in range(NUM_DOWN):
                begun = time.monotonic()
                served.append(hand_off())
                assert time.monotonic() - begun < AT_ONCE_S
            if place.serves_in_trouble:
                assert served[1:] == [True] * (NUM_DOWN - 1)
            place.recover(state)
            end = time.monotonic() + BACK_S
            while not hand_off():
                assert time.monotonic() < end, "it is not used again"
