"""Chats with images between whole vLLM servers, in which one process prepares an image and another computes with it."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.multimodal import image, make_blip2
from support.vllm_servers import Server, held, require_nothing_kept, router_before, vllm_servers
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]

METRIC = "vllm:kvferry_p2p_connector"
P2P = {"kv_connector": "P2pConnector"}
TEXTS = ("What is this?", "def add(a, b):\n" * 20)
NUM_IMAGES = 6


def chat(seed: int, text: str) -> dict[str, Any]:
    """A question about one image."""
    png = io.BytesIO()
    image(seed).save(png, "png")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 8}
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fixed}


def answers(url: str, asked: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    """The tokens of the answers, asked at once."""

    def one(body: dict[str, Any]) -> list[int]:
        response = httpx.post(url + "/v1/chat/completions", json=body | options, timeout=120)
        assert response.status_code == 200, response.text
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


def test_images_between_servers(tmp_path: Path) -> None:
    model, arguments = str(make_blip2(tmp_path / "model")), ("--max-model-len", "2048")
    pair = {role: Server(role, P2P, arguments, model=model) for role in ("prefill", "decode")}
    asked = [chat(seed, text) for text in TEXTS for seed in range(NUM_IMAGES)]
    with vllm_servers(tmp_path, **pair) as servers:
        prefill, decode = servers["prefill"], servers["decode"]
        right = answers(decode.url, asked, cache_salt="alone")
        assert len({*map(tuple, right)}) > NUM_IMAGES, "the answers do not depend on the images"
        with (
            router_before(tmp_path, prefill, decode) as sequential,
            router_before(tmp_path, prefill, decode, "--hand-off=concurrent") as concurrent,
        ):
            for form, router in (("sequential", sequential), ("concurrent", concurrent)):
                for turn in ("first", "again"):  # the second time the servers have the images already
                    assert answers(router.url, asked, cache_salt=f"{form} {turn}") == right
        until(
            lambda: held(decode.url) == 0 and decode.metric(METRIC + "_taken_total") == 4 * len(asked), 30, decode.log
        )
        assert decode.metric(METRIC + "_lost_total") == 0
        require_nothing_kept(prefill, decode)
