"""Keys of KV inside vLLM: stored when P's answer ends, loaded by D, through a proxy and through the router."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from key_proxy import KeyProxy
from support.processes import KvferryProcess
from support.vllm_servers import (
    Reference,
    Server,
    answers,
    body_of,
    num_received,
    require_nothing_kept,
    router_before_all,
    vllm_servers,
)

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(900)]

BLOCK_SIZE = 32
NUM_PROMPTS = 40


def keyed(url: str, prompts: list[list[int]], field: str, one_each: bool, **options: Any) -> list[list[int]]:
    """The tokens that a server answers these prompts with, all at once, each with keys of its own in `field`."""

    def keys(number: int) -> list[str]:
        num_keys = 1 if one_each else max(1, len(prompts[number]) // BLOCK_SIZE)
        return [f"{one_each} {number}/{at}" for at in range(num_keys)]

    async def ask(session: aiohttp.ClientSession, number: int) -> list[int]:
        body = body_of(prompts[number], kv_transfer_params={field: keys(number), "kvcache_wait_s": 5}, **options)
        async with session.post(url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            found: list[int] = (await response.json())["choices"][0]["token_ids"]
            return found

    async def everything() -> list[list[int]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            return await asyncio.gather(*(ask(session, number) for number in range(len(prompts))))

    return asyncio.run(everything())


def through_the_proxy(servers: list[KvferryProcess], prompts: list[list[int]]) -> list[list[int]]:
    """What the example's proxy answers, half of them streamed."""
    urls = [one.url for one in servers]

    async def everything() -> list[list[int]]:
        async with AsyncExitStack() as stack:
            runner = web.AppRunner(KeyProxy(urls[:2], urls[2:]).app())
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return await asyncio.to_thread(answers, url, prompts)

    return asyncio.run(everything())


def test_keys(tmp_path: Path, reference: Reference) -> None:
    prompts = [[*prompt] for prompt in reference.prompts if len(prompt) <= 20 * BLOCK_SIZE][:NUM_PROMPTS]
    tokens = [reference.tokens[reference.prompts.index(prompt)] for prompt in prompts]
    extra = {"store": f"file:{tmp_path}/kv?deadline_s=5"}
    transfer = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": extra}
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    with vllm_servers(tmp_path, **{name: Server(role, transfer) for name, role in roles.items()}) as servers:
        p, _, d, _ = started = list(servers.values())
        for one_each in (True, False):
            # A prompt's first token differs each time, so that each run stores and loads KV of its own.
            own = [[(prompt[0] + 1 + one_each) % 4000, *prompt[1:]] for prompt in prompts]
            keyed(p.url, own, "kvcache_store_keys", one_each, max_tokens=1)
            before = num_received(d)
            expected = answers(servers["p1"].url, own)
            assert keyed(d.url, own, "kvcache_load_keys", one_each) == expected
            usable = {tuple(prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE]) for prompt in own}
            assert num_received(d) - before >= sum(map(len, usable)) * 0.9  # the rest begins like another prompt
        assert "keys do not bring" not in d.log
        assert through_the_proxy(started, prompts) == tokens
        assert "keys do not bring" not in d.log
        with router_before_all(tmp_path, started[:2], started[2:], "--protocol=keys") as router:
            assert answers(router.url, [prompt[1:] or [9] for prompt in prompts]) == answers(
                p.url, [prompt[1:] or [9] for prompt in prompts]
            )
            assert 'hand_offs_total{kind="sequential"' in httpx.get(router.url + "/metrics").text
        wrong = body_of(prompts[-1], kv_transfer_params={"kvcache_load_keys": ["True 0/0"], "kvcache_wait_s": 1})
        for body in (wrong, {**wrong, "kv_transfer_params": {"kvcache_load_keys": "text"}}):
            response = httpx.post(servers["d1"].url + "/v1/completions", json=body, timeout=60)
            assert response.json()["choices"][0]["token_ids"] == tokens[-1]
        require_nothing_kept(*started)
