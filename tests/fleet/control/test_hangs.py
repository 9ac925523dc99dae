"""Who counts as hung."""

from __future__ import annotations

import asyncio

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.control.hangs import HangWatch


async def test_who_never_answered_is_judged_only_where_its_backend_knows_that_it_could() -> None:
    """The health of others may be elsewhere, or not to be reached from here."""
    found: list[str] = []
    nowhere = "http://127.0.0.1:9"
    here = Member("decode-0", "decode", "r", MemberState.SERVING, url=nowhere, health_url=nowhere)
    elsewhere = Member("decode-1", "decode", "r", MemberState.SERVING, url=nowhere)

    async def hangs(name: str, why: str) -> None:
        found.append(name)

    watch = HangWatch(SYSTEM_CLOCK, hangs)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        watch.follow([here, elsewhere], 0.1, group)
        while not found:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        watch.end()
    assert found == ["decode-0"]
