"""A store that is down between two vLLMs: the tokens of plain vLLM, at once, and the store again when it is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from adapters.test_hand_off import loaded
from support.valkey_server import BINARIES, ValkeyServer, server_binary
from support.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(300)]

NUM_TOKENS, PROMPT = 8, 200
TIMEOUT_S = 300.0
AT_ONCE_S, BACK_S = 15.0, 60.0
"""For a request beside a store that is down, and until a store is used again, on a machine that does much else."""
TROUBLES: dict[str, tuple[Callable[[ValkeyServer], object], Callable[[ValkeyServer], object]]] = {
    "killed": (ValkeyServer.kill, ValkeyServer.start),
    "hung": (ValkeyServer.pause, ValkeyServer.resume),
    "full": (
        lambda server: server.say("CONFIG", "SET", "maxmemory", "1"),
        lambda server: server.say("CONFIG", "SET", "maxmemory", "0"),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    server = ValkeyServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def pair(start_vllm: VllmMaker, server: ValkeyServer) -> tuple[VllmProcess, VllmProcess, VllmProcess]:
    extra = {"store": server.url, "timeout_s": TIMEOUT_S}
    both = [
        start_vllm(connector("KvferryKVStoreConnector", role, **extra), enable_prefix_caching=False)
        for role in ("kv_producer", "kv_consumer")
    ]
    plain = start_vllm(None)
    return both[0].ready(), both[1].ready(), plain.ready()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_store_in_trouble(
    trouble: str,
    pair: tuple[VllmProcess, VllmProcess, VllmProcess],
    server: ValkeyServer,
    prompt_of: PromptMaker,
) -> None:
    prefill, decode, plain = pair
    numbers = iter(range(1000))

    def hand_off() -> bool:
        """Of a new prompt; returns whether its KV came through the store."""
        number = next(numbers)
        prompt = [number, len(trouble), *prompt_of(PROMPT)]
        before, begun = loaded(decode), time.monotonic()
        ticket = prefill.prefill(prompt, f"{trouble}-{number}")
        assert decode.run(prompt, NUM_TOKENS, ticket).token_ids == plain.run(prompt, NUM_TOKENS).token_ids
        assert time.monotonic() - begun < AT_ONCE_S
        return loaded(decode) > before

    begin, end = TROUBLES[trouble]
    assert hand_off()
    begin(server)
    assert not any(hand_off() for _ in range(3))
    end(server)
    give_up = time.monotonic() + BACK_S
    while not hand_off():
        assert time.monotonic() < give_up, "it is not used again"
    prefill.settled()
    decode.settled()
