"""A vLLM server that dies within streams: another repeats them, and clients see one answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import KvferryProcess, kvferry
from support.vllm_servers import Server, body_of, kill, vllm_servers

pytestmark = pytest.mark.vllm

BODIES: list[dict[str, Any]] = [
    body_of(range(7, 80), max_tokens=200, stream=True, logprobs=1),
    body_of(range(9, 120), max_tokens=200, stream=True, stream_options={"include_usage": True}),
    body_of(range(5, 50), max_tokens=200, stream=True, temperature=0.8, seed=3),
]


def stream(
    router: KvferryProcess, body: dict[str, Any], kills: dict[str, KvferryProcess] | None = None
) -> dict[str, Any]:
    """What a stream says in all; the server of `kills` that it comes from ends in its middle."""
    found: dict[str, Any] = {"ids": [], "text": "", "finish": [], "logprobs": 0, "usage": None}
    name = {"X-Request-Id": "killing"} if kills else {}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, headers=name, timeout=200) as response:
        for number, line in enumerate(one for one in response.iter_lines() if one.startswith("data: {")):
            if number == 30 and kills is not None:
                decisions = router.get("/kvferry/decisions").json()["decisions"]
                kill(kills[next(one["decode"] for one in decisions if one["request_id"] in name.values())])
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event.get("usage"):  # how much of the prompt was cached differs between servers
                found["usage"] = {name: n for name, n in event["usage"].items() if name != "prompt_tokens_details"}
            for choice in event["choices"]:
                found["ids"] += choice["token_ids"] or []
                found["text"] += choice["text"]
                found["logprobs"] += len((choice.get("logprobs") or {}).get("tokens", []))
                found["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


def test_one_of_two_dies(tmp_path: Path) -> None:
    with (
        vllm_servers(tmp_path, one=Server("serve"), other=Server("serve")) as servers,
        kvferry(
            "router",
            *(f"--decode-url={one.url}" for one in servers.values()),
            "--policy=round_robin",
            log=tmp_path / "router.log",
        ) as router,
    ):
        expected = [stream(router, body) for body in BODIES]
        assert all(len(one["ids"]) == 200 and one["finish"] == ["length"] for one in expected)
        with ThreadPoolExecutor(4) as pool:  # half of them on the server that dies
            asked = [pool.submit(stream, router, body) for body in BODIES]
            by_name = {f"decode-{number}": one for number, one in enumerate(servers.values())}
            killing = pool.submit(stream, router, BODIES[0], by_name)
            assert killing.result() == expected[0]
            assert [one.result() for one in asked] == expected
        assert router.metric("kvferry_router_continuations_total", outcome="done") >= 1
