"""What a controller tells real routers, and what it learns from them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.control.router_client import RouterClient
from support.processes import AUTH_TOKEN, begun, kvferry

DECODE = Member("decode-0", "decode", "r", MemberState.SERVING, url="http://127.0.0.1:9")


@pytest.mark.processes
async def test_routers_that_share_nothing_are_each_told(tmp_path: Path) -> None:
    """One that does not answer keeps nobody from telling the others."""
    arguments = ("router", "--registration", "--host=127.0.0.1")
    with begun(*arguments, log=tmp_path / "a") as first, begun(*arguments, log=tmp_path / "b") as second:
        urls = [first().url, second().url]
        async with RouterClient(AUTH_TOKEN) as front:
            views = await front.declare(["http://127.0.0.1:9", *urls], [DECODE], [])
            assert views is not None
            assert (views["decode-0"].draining, views["decode-0"].drained) == (False, False)
            for one in urls:
                assert list(await front.views(one) or {}) == ["decode-0"]
            await front.declare(urls[:1], [DECODE], ["decode-0"])
            views = await front.declare(urls, [DECODE], [])  # it is still draining at the first
            assert views is not None
            assert (views["decode-0"].draining, views["decode-0"].drained) == (True, False)
            async with asyncio.timeout(30):
                while not (views and views["decode-0"].drained):
                    views = await front.declare(urls, [DECODE], ["decode-0"])
            assert await front.declare(["http://127.0.0.1:9"], [DECODE], []) is None


@pytest.mark.processes
async def test_what_a_router_refuses_again_and_again_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvferry("router", "--registration", "--host=127.0.0.1", log=tmp_path / "a") as router:
        wrong = [DECODE, replace(DECODE, name="decode-1")]  # both at one address
        async with RouterClient(AUTH_TOKEN) as front:
            for _ in range(3):
                assert await front.declare([router.url], wrong, []) is None
            assert len([one for one in caplog.messages if "two instances have the URL" in one]) == 1
            await front.declare([router.url], [DECODE], [])
            assert await front.declare([router.url], wrong, []) is None
            assert len([one for one in caplog.messages if "two instances have the URL" in one]) == 2
