"""A proxy that knows vLLM's P-then-D protocol and nothing of kvferry drives kvferry's own instances."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.peers import serving
from support.processes import KvferryProcess, begun

pytestmark = pytest.mark.processes

TRANSFERS = {
    "p2p": {"kv_connector": "P2pConnector"},
    "files": {"kv_connector": "SharedStorageConnector"},
}


class PlainProxy:
    """One P and one D: P first, with a limit of one token; D then gets what P answered in `kv_transfer_params`."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._client = httpx.AsyncClient(timeout=60)
        self._prefill, self._decode = prefill, decode
        self.app = Starlette(routes=[Route("/v1/{kind:path}", self._serve, methods=["POST"])])

    async def _serve(self, request: Request) -> Response:
        body, path = await request.json(), request.url.path
        headers = {"X-Request-Id": f"{random.getrandbits(64):x}"}
        prefilled = await self._client.post(self._prefill + path, json=self._prefill_body(body), headers=headers)
        prefilled.raise_for_status()
        ticket = prefilled.json().get("kv_transfer_params") or {}
        whole = {**body, "kv_transfer_params": ticket}
        if body.get("stream"):
            return StreamingResponse(self._stream(path, whole, headers), media_type="text/event-stream")
        answer = await self._client.post(self._decode + path, json=whole, headers=headers)
        return JSONResponse(answer.json(), status_code=answer.status_code)

    @staticmethod
    def _prefill_body(body: dict[str, Any]) -> dict[str, Any]:
        asked = {**body, "stream": False, "max_tokens": 1, "min_tokens": 1}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        asked.pop("stream_options", None)
        asked["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        return asked

    async def _stream(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        async with self._client.stream("POST", self._decode + path, json=body, headers=headers) as answer:
            async for chunk in answer.aiter_bytes():
                yield chunk


@pytest.fixture(scope="module", params=TRANSFERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_maker: Any
) -> Iterator[tuple[KvferryProcess, KvferryProcess]]:
    """`kvferry prefill` and `kvferry decode`."""

    folder: Path = tmp_path_factory.mktemp("pair")
    transfer = dict(TRANSFERS[request.param])
    if request.param == "files":
        transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "kv")}  # type: ignore[assignment]
    flags = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    common = (str(model_maker("llama")), *flags, f"--kv-transfer-config={json.dumps(transfer)}")
    with begun("prefill", *common, log=folder / "p.log") as p, begun("decode", *common, log=folder / "d.log") as d:
        yield p(), d()


PROMPTS = [[7 + (number * place) % 900 for place in range(length)] for number, length in enumerate([1, 40, 333, 1500])]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_those_of_one_instance(stream: bool, pair: tuple[KvferryProcess, KvferryProcess]) -> None:
    prefill, decode = pair
    proxy = PlainProxy(prefill.url, decode.url)
    before = decode.metric("vllm:external_prefix_cache_hits_total")
    async with serving(proxy.app) as url, httpx.AsyncClient(timeout=60) as client:
        for prompt in PROMPTS:
            salted = f"{stream}"  # so that D has nothing of its own
            options = {"stream": stream, "cache_salt": salted}
            assert await tokens(client, url, prompt, **options) == tokens_alone(decode, prompt)
    assert decode.metric("vllm:external_prefix_cache_hits_total") > before
    prefill.require_clean()
    decode.require_clean()


OTHER = {"weights": {"seed": 5}, "defaults": {}}


@pytest.mark.parametrize("other", OTHER)
async def test_no_answer_is_of_two_models(other: str, model_maker: Any, tmp_path: Path) -> None:
    """D has other weights than P, or other sampling defaults: each answer is what D alone gives."""
    weights = model_maker("llama")
    folder = tmp_path / "other"
    shutil.copytree(model_maker("llama", **OTHER[other]), folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 2}' if other == "defaults" else "{}")
    flags = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    common = (*flags, f"--kv-transfer-config={json.dumps(TRANSFERS['p2p'])}")
    p_log, d_log = tmp_path / "p.log", tmp_path / "d.log"
    with begun("prefill", str(weights), *common, log=p_log) as p, begun("decode", str(folder), *common, log=d_log) as d:
        prefill, decode = p(), d()
        async with serving(PlainProxy(prefill.url, decode.url).app) as url, httpx.AsyncClient(timeout=60) as client:
            for seed, length in enumerate([1, 40, 333]):
                prompt = [7 + seed * place % 900 for place in range(length)]
                for sampling in ({}, {"temperature": 0}) if other == "weights" else ({},):
                    fixed = {"seed": seed, "max_tokens": 12, "ignore_eos": True, "temperature": None, **sampling}
                    alone = decode.complete(prompt, cache_salt="alone", **fixed)["choices"][0]["token_ids"]
                    assert await tokens(client, url, prompt, stream=False, **fixed) == alone
        assert decode.metric("kvferry:first_tokens_not_adopted_total") > 0
        assert (decode.metric("kvferry:kv_load_failures_total", kind="LayoutMismatch") > 0) == (other == "weights")
        decode.require_clean()


def tokens_alone(decode: KvferryProcess, prompt: list[int]) -> list[int]:
    found: list[int] = decode.complete(prompt, cache_salt="alone")["choices"][0]["token_ids"]
    return found


async def tokens(client: httpx.AsyncClient, url: str, prompt: list[int], **options: Any) -> list[int]:
    """What the proxy answers, whole or streamed."""

    fixed = {"model": "m", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = await client.post(url + "/v1/completions", json={**fixed, "prompt": prompt, **options})
    assert response.status_code == 200, response.text
    if not options["stream"]:
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or []]
