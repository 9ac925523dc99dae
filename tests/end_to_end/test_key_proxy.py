"""The proxy before two prefill and two decode instances, any of which, and the store, may be killed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from key_proxy import KeyProxy
from support.processes import KvferryProcess, begun, kvferry
from support.valkey_server import BINARIES, ValkeyServer, server_binary

pytestmark = pytest.mark.processes
MODEL = "kvferry/tiny-python"
NUM_AT_ONCE = 200


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    server = ValkeyServer()
    yield server
    server.close()


@pytest.fixture
def instances(server: ValkeyServer, tmp_path: Path) -> Iterator[list[KvferryProcess]]:
    """P, P, D, D, and an instance alone."""
    transfer = {"kv_connector": "KVStoreConnector"}
    extra = {"store": f"{server.url}?deadline_s=3", "timeout_s": 20}
    flags = ("--dtype=float32", "--kv-cache-memory=48MiB", "--max-num-seqs=64")
    with ExitStack() as stack:

        def start(command: str, number: int, *more: str) -> Any:
            log = tmp_path / f"{command}{number}.log"
            return stack.enter_context(begun(command, MODEL, *flags, *more, log=log, ends_cleanly=False))

        config = "--kv-transfer-config=" + json.dumps({**transfer, "kv_connector_extra_config": extra})
        starting = [start(role, number, config) for role in ("prefill", "decode") for number in range(2)]
        yield [ready() for ready in [*starting, start("decode", 2)]]


@asynccontextmanager
async def proxy_of(instances: list[KvferryProcess]) -> AsyncIterator[str]:
    urls = [one.url for one in instances]
    runner = web.AppRunner(KeyProxy(urls[:2], urls[2:4], timeout_s=120).app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def requests(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Different prompts of 1 to 330 tokens, as text, token ids and messages, greedy and seeded."""
    drawn, made = random.Random(29), list[tuple[str, dict[str, Any]]]()
    for at in range(number):
        ids = [drawn.randrange(10, 3900) for _ in range(drawn.choice([1, 15, 16, 17, 64, 200, 330]))]
        text = f"def number_{at}(values):\n    " + "total = total + 1\n    " * drawn.randrange(1, 30)
        sampling: dict[str, Any] = {"max_tokens": 6, "temperature": 0} if at % 2 else {"max_tokens": 6, "seed": at}
        match at % 3:
            case 0:
                made.append(("/v1/completions", {"prompt": ids, **sampling}))
            case 1:
                made.append(("/v1/completions", {"prompt": text, **sampling}))
            case _:
                made.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **sampling}))
    return made


async def ask(client: aiohttp.ClientSession, url: str, request: tuple[str, dict[str, Any]]) -> Any:
    path, body = request
    async with client.post(url + path, json=body) as response:
        content = await response.read()
        assert response.status == 200, content[:500]
        return [choice.get("text", choice.get("message")) for choice in json.loads(content)["choices"]]


async def stream(client: aiohttp.ClientSession, url: str, request: tuple[str, dict[str, Any]]) -> str:
    path, body = request
    async with client.post(url + path, json={**body, "stream": True}) as response:
        lines = (await response.read()).decode().split("\n\n")
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice.get("text") or "" for event in events for choice in event["choices"])


async def test_answers_are_those_of_one_instance(instances: list[KvferryProcess]) -> None:
    asked = requests(24)
    async with proxy_of(instances) as url, aiohttp.ClientSession() as client:
        alone = await asyncio.gather(*(ask(client, instances[4].url, one) for one in asked))
        assert await asyncio.gather(*(ask(client, url, one) for one in asked)) == alone
        texts = [number for number, (path, _) in enumerate(asked) if path == "/v1/completions"]
        streamed = await asyncio.gather(*(stream(client, url, asked[number]) for number in texts))
        assert streamed == [alone[number][0] for number in texts]
        several = ("/v1/completions", {"prompt": "def add(a, b):", "n": 3, "seed": 5, "max_tokens": 5})
        assert await ask(client, url, several) == await ask(client, instances[4].url, several)
    loaded = sum(one.metric("kvferry:connector_loaded_blocks_total") for one in instances[2:4])
    assert loaded > 0
    assert sum(one.metric("kvferry:connector_found_keys_total") for one in instances[2:4]) >= len(asked) // 2
    assert sum(one.metric("kvferry:connector_refused_keys_total") for one in instances[2:4]) == 0
    for one in instances:
        one.require_clean()


async def test_the_router_hands_off_by_keys(instances: list[KvferryProcess], tmp_path: Path) -> None:
    asked = requests(12)
    urls = [f"--prefill-url={one.url}" for one in instances[:2]] + [f"--decode-url={one.url}" for one in instances[2:4]]
    with kvferry("router", *urls, "--protocol=keys", "--client-kv-keys", log=tmp_path / "router.log") as router:
        async with aiohttp.ClientSession() as client:
            alone = await asyncio.gather(*(ask(client, instances[4].url, one) for one in asked))
            assert await asyncio.gather(*(ask(client, router.url, one) for one in asked)) == alone
            texts = [number for number, (path, _) in enumerate(asked) if path == "/v1/completions"]
            keyed = [(path, {**body, "kvcache_store_keys": ["mine"]}) for path, body in (asked[at] for at in texts)]
            streamed = await asyncio.gather(*(stream(client, router.url, one) for one in keyed))
            assert streamed == [alone[number][0] for number in texts]
    assert sum(one.metric("kvferry:connector_stored_keys_total") for one in instances[:2]) >= len(asked)
    assert sum(one.metric("kvferry:connector_found_keys_total") for one in instances[2:4]) >= len(asked) // 2
    for one in instances:
        one.require_clean()


@pytest.mark.full
async def test_200_at_once_while_instances_and_the_store_are_killed(
    instances: list[KvferryProcess], server: ValkeyServer
) -> None:
    asked = requests(NUM_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=250)
    connector = aiohttp.TCPConnector(limit=NUM_AT_ONCE)
    async with proxy_of(instances) as url, aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        alone = await asyncio.gather(*(ask(client, instances[4].url, one) for one in asked))
        running = [asyncio.create_task(ask(client, url, one)) for one in asked]
        for at, kill in ((20, instances[0].kill), (60, server.kill), (110, instances[2].kill)):
            while sum(task.done() for task in running) < at:
                await asyncio.wait(running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(kill)
        await asyncio.to_thread(server.start)
        assert await asyncio.gather(*running) == alone
