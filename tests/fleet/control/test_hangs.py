"""Who counts as hung."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.control.hangs import HangWatch


async def hung(members: Sequence[Member], timeout_s: float, until: asyncio.Event) -> list[str]:
    """The names of those that count as hung before `until` is set, or soon after."""
    found: list[str] = []

    async def hangs(name: str, reason: str) -> None:
        found.append(name)
        until.set()

    watch = HangWatch(hangs)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        watch.follow(members, timeout_s, group)
        await until.wait()
        await asyncio.sleep(0.5)
        watch.end()
    return found


async def test_who_never_answered_is_judged_only_where_its_backend_knows_that_it_could() -> None:
    """The health of others may be elsewhere, or not to be reached from here."""
    nowhere = "http://127.0.0.1:9"
    here = Member("decode-0", "decode", "r", MemberState.SERVING, url=nowhere, health_url=nowhere)
    elsewhere = Member("decode-1", "decode", "r", MemberState.SERVING, url=nowhere)
    assert await hung([here, elsewhere], 0.1, asyncio.Event()) == ["decode-0"]


async def test_who_is_slow_does_not_hang() -> None:
    """Each check is answered only when the next but one has come: later than there is between two of them."""
    waiting: list[asyncio.Event] = []
    enough = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            waiting.append(mine := asyncio.Event())
            for one in waiting[:-2]:
                one.set()
            if len(waiting) == 10:
                enough.set()
            await mine.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        slow = Member("decode-0", "decode", "r", MemberState.SERVING, url=url, health_url=url)
        assert await hung([slow], 1.0, enough) == []
        for one in waiting:
            one.set()
