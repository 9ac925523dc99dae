"""A store in trouble between two vLLMs: the tokens of plain vLLM, at once, and the store again when it is well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from adapters.test_hand_off import loaded
from support.troubled_stores import DISK_STATES, MOUNTED, SERVER_STATES, OnDisk, OnServer
from support.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.short_deadlines]

NUM_TOKENS, PROMPT = 8, 200
TIMEOUT_S = 300.0
AT_ONCE_S, BACK_S = 15.0, 60.0
"""For a request beside a store that is down, and until a store is used again, on a machine that does much else."""
STORES = {
    **dict.fromkeys(("valkey", "tiers", "lmcache"), SERVER_STATES),
    "disk": [state for state in DISK_STATES if state not in MOUNTED and state != "full for long files"],
    "mounted disk": MOUNTED,
}
SHORT = [("valkey", "killed"), ("valkey", "hung"), ("valkey", "full"), ("valkey", "read-only")]


CELLS = [
    pytest.param(store, state, marks=[] if (store, state) in SHORT else [pytest.mark.full])
    for store, states in STORES.items()
    for state in states
]
"""Store by store, as each has vLLMs of its own."""


class Pair:
    """Two vLLMs and the store between them."""

    def __init__(self, store: str, start_vllm: VllmMaker, folder: Any, stack: ExitStack) -> None:
        self.both: list[VllmProcess] = []
        disk = store.endswith("disk")
        self.place = (
            OnDisk(folder, stack, self._hold_up_disk, mount=store == "mounted disk")
            if disk
            else OnServer(store, folder, stack, link=True)
        )
        extra = {**self.place.extra, "timeout_s": TIMEOUT_S}
        self.both += [
            start_vllm(connector(f"Kvferry{self.place.connector}", role, **extra), enable_prefix_caching=False)
            for role in ("kv_producer", "kv_consumer")
        ]
        for one in self.both:
            stack.callback(one.close)
            one.ready()

    def _hold_up_disk(self, seconds: float) -> None:
        for one in self.both:
            one.ask("hold_up_disk", seconds=seconds)


@pytest.fixture(scope="module")
def plain(start_vllm: VllmMaker) -> VllmProcess:
    return start_vllm(None).ready()


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, start_vllm: VllmMaker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(request.param, start_vllm, tmp_path_factory.mktemp("store"), stack)


@pytest.mark.parametrize(("pair", "state"), CELLS, indirect=["pair"])
def test_a_store_in_trouble(state: str, pair: Pair, plain: VllmProcess, prompt_of: PromptMaker) -> None:
    prefill, decode = pair.both
    numbers = iter(range(1000))

    def hand_off() -> bool:
        """Of a new prompt; returns whether its KV came through the store."""
        number = next(numbers)
        prompt = [number, len(state), *prompt_of(PROMPT)]
        before, begun = loaded(decode), time.monotonic()
        ticket = prefill.prefill(prompt, f"{state}-{number}")
        assert decode.run(prompt, NUM_TOKENS, ticket).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
        assert time.monotonic() - begun < AT_ONCE_S
        return loaded(decode) > before

    assert hand_off()
    pair.place.trouble(state)
    served = [hand_off() for _ in range(3)]
    if pair.place.serves_in_trouble:
        assert served[1:] == [True, True]
    elif state not in ("restarted empty", "emptied"):
        assert not any(served)
    pair.place.recover(state)
    give_up = time.monotonic() + BACK_S
    while not hand_off():
        assert time.monotonic() < give_up, "it is not used again"
    prefill.settled()
    decode.settled()
