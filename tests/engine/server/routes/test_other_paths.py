"""Paths of other servers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvferry.engine.server.routes.other_paths import explain_path

from ..fake_engine import DeterministicEngine
from ..running import running


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/audio/transcriptions", "speech"),
        ("/v1/completions/render", "render"),
        ("/flush_cache", "/reset_prefix_cache"),
        ("/generate", "/v1/completions"),
    ],
)
def test_a_404_names_what_serves_the_path(base_url: str, path: str, remedy: str) -> None:
    response = httpx.post(base_url.removesuffix("/v1") + path, json={})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"].startswith(f"{path} is not served by kvferry's engine: ")
    assert remedy in error["message"]
    assert error.get("code", "unknown_url") == "unknown_url"  # Anthropic's errors have no code


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/respond", "*", "/nothing"])
def test_other_unknown_paths_are_invalid(path: str) -> None:
    assert explain_path(path) is None


async def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with httpx.AsyncClient(headers=headers) as client:
        response = await client.request(method, url + path, json=body)
        return response.status_code, response.json()


async def test_paths_of_vllm_that_operators_and_probes_request(engine: DeterministicEngine) -> None:
    async with running(engine) as server:
        for method in ("GET", "POST"):
            assert (await ask(server.url, method, "/ping"))[0] == 200
        assert (await ask(server.url, "GET", "/load")) == (200, {"server_load": 1})
        _, info = await ask(server.url, "GET", "/server_info")
        assert info["instance"]["connector"] == "its-connector"
        _, tokenizer = await ask(server.url, "GET", "/tokenizer_info")
        assert (tokenizer["eos_token"], tokenizer["model_max_length"]) == ("<|end|>", 2048)
        assert "add_generation_prompt" in tokenizer["chat_template"]
        for path in ("/tokenize", "/v1/tokenize"):
            _, tokens = await ask(server.url, "POST", path, {"prompt": "A ferry", "add_special_tokens": False})
        for path in ("/detokenize", "/v1/detokenize"):
            assert await ask(server.url, "POST", path, {"tokens": tokens["tokens"]}) == (200, {"prompt": "A ferry"})
        assert await ask(server.url, "POST", "/reset_prefix_cache") == (200, {"success": True})
        assert (await ask(server.url, "POST", "/reset_prefix_cache?reset_external=true"))[0] == 400
        assert await ask(server.url, "POST", "/abort_requests", {"request_ids": ["a"]}) == (200, {"aborted": 1})
        assert (await ask(server.url, "POST", "/abort_requests", {"request_ids": "a"}))[0] == 400


async def test_only_operators_reset_and_abort(engine: DeterministicEngine) -> None:
    async with running(engine, api_key=("client",), admin_key=("operator",)) as server:
        for path in ("/reset_prefix_cache", "/abort_requests"):
            for key, status in (("client", 401), ("operator", 200)):
                assert (await ask(server.url, "POST", path, {}, Authorization=f"Bearer {key}"))[0] == status
