"""Two routers that name no instance, and instances that register at both: real processes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.members import Member
from support.ports import free_port
from support.processes import OPERATOR, KvferryProcess, kvferry
from support.waiting import until

pytestmark = pytest.mark.processes

ROUTER = ("router", "--registration", "--registration-lease-s=3", "--health-interval-s=0.3", "--health-timeout-s=1")


def instances(router: KvferryProcess) -> list[tuple[str, bool]]:
    """Role and whether it is drained, of all that the router knows."""
    found = httpx.get(router.url + "/kvferry/instances", auth=OPERATOR, timeout=30).json()["instances"]
    return sorted((one["role"], one["draining"]) for one in found)


def test_instances_register_at_two_routers(model_maker: Any, tmp_path: Path) -> None:
    model, both = model_maker("llama"), [("decode", False), ("prefill", False)]
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        first = ExitStack()
        stack.callback(first.close)
        routers = [
            first.enter_context(kvferry(*ROUTER, log=tmp_path / "first.log", ends_cleanly=False, port=ports[0])),
            stack.enter_context(kvferry(*ROUTER, log=tmp_path / "second.log", port=ports[1])),
        ]
        register = (f"--register={routers[0].url},{routers[1].url}",)
        members = [Member(role, model, tmp_path, more=register) for role in ("prefill", "decode")]
        for member in members:
            stack.callback(member.stop)
            member.start()
        prefill, decode = members
        for router in routers:
            until(lambda one=router: instances(one) == both, timeout_s=30)
        expected = decode.process.complete("Hello", cache_salt="alone")["choices"][0]["token_ids"]
        for router in routers:
            answer = router.complete("Hello", cache_salt=router.url)
            assert answer["choices"][0]["token_ids"] == expected
        assert prefill.process.metric("vllm:request_success_total") == 2

        routers[0].kill()
        first.close()
        again = stack.enter_context(kvferry(*ROUTER, log=tmp_path / "again.log", port=ports[0]))
        until(lambda: instances(again) == both, timeout_s=30)
        assert again.complete("Hello")["choices"][0]["token_ids"] == expected

        assert prefill.process.stop() == 0  # it takes its leave
        for router in (again, routers[1]):
            assert instances(router) == [("decode", False)]
            assert router.complete("Hello again")["choices"]
        decode.process.kill()  # it cannot
        for router in (again, routers[1]):
            until(lambda one=router: instances(one) == [], timeout_s=30)
        assert again.post("/v1/completions", {"prompt": "Hello"}).status_code == 503
