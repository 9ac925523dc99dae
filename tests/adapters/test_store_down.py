"""A store in trouble between two vLLMs: the tokens of plain vLLM, at once, and the store again when it is well."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

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
SHORT = [("valkey", "killed"), ("valkey", "hung"), ("valkey", "full"), ("valkey", "read-only")]
STORES = dict.fromkeys(("valkey", "tiers", "lmcache"), SERVER_STATES) | {"disk": DISK_STATES}
CELLS = [
    pytest.param(store, state, marks=[] if (store, state) in SHORT else [pytest.mark.full])
    for store, states in STORES.items()
    for state in states
    if state != "full for long files"  # a limit of the test's own process
]


class Pair:
    """Two vLLMs and the store between them."""

    def __init__(self, store: str, state: str, start_vllm: VllmMaker, folder: Path, stack: ExitStack) -> None:
        self.place: OnServer | OnDisk
        if store == "disk":
            self.place = OnDisk(folder, stack, self._hold_up_disk, mount=state in MOUNTED)
        else:
            self.place = OnServer(store, folder, stack, link=state == "slow")
        extra = {**self.place.extra, "timeout_s": TIMEOUT_S}
        self.prefill, self.decode = (
            start_vllm(connector(f"Kvferry{self.place.connector}", role, **extra), enable_prefix_caching=False)
            for role in ("kv_producer", "kv_consumer")
        )
        for one in (self.prefill, self.decode):
            stack.callback(one.close)
            one.ready()

    def _hold_up_disk(self, seconds: float) -> None:
        for one in (self.prefill, self.decode):
            one.ask("hold_up_disk", seconds=seconds)


@pytest.fixture(scope="module")
def plain(start_vllm: VllmMaker) -> VllmProcess:
    return start_vllm(None).ready()


@pytest.mark.parametrize(("store", "state"), CELLS)
def test_a_store_in_trouble(
    store: str, state: str, start_vllm: VllmMaker, plain: VllmProcess, prompt_of: PromptMaker, tmp_path: Path
) -> None:
    numbers = iter(range(1000))

    def hand_off(pair: Pair) -> bool:
        """Of a new prompt; returns whether its KV came through the store."""
        number = next(numbers)
        prompt = [number, *prompt_of(PROMPT)]
        before, begun = loaded(pair.decode), time.monotonic()
        ticket = pair.prefill.prefill(prompt, f"t-{number}")
        assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
        assert time.monotonic() - begun < AT_ONCE_S
        return loaded(pair.decode) > before

    with ExitStack() as stack:
        pair = Pair(store, state, start_vllm, tmp_path, stack)
        assert hand_off(pair)
        pair.place.trouble(state)
        served = [hand_off(pair) for _ in range(3)]
        if pair.place.serves_in_trouble:
            assert served[1:] == [True, True]
        elif state not in ("restarted empty", "emptied"):
            assert not any(served)
        pair.place.recover(state)
        give_up = time.monotonic() + BACK_S
        while not hand_off(pair):
            assert time.monotonic() < give_up, "it is not used again"
        pair.prefill.settled()
        pair.decode.settled()
