"""`kvferry top` over a real stream."""

from __future__ import annotations

import asyncio
import json

import pytest
from textual.widgets import DataTable

from kvferry.cli.router_address import RouterAddress
from kvferry.cli.watch.follow import events, find
from kvferry.cli.watch.top import Top, once
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from support.page_server import HOSTILE, serving, url_of
from support.page_source import FakeSource, view
from support.waiting import eventually


async def until(top: Top, text: str) -> None:
    async with asyncio.timeout(20):
        await eventually(lambda: text in "\n".join(str(widget.render()) for widget in top.query("Static")))


def cells(top: Top) -> list[list[str]]:
    table = top.query_one(DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


async def test_it_shows_instances_and_what_happens_to_them() -> None:
    source = FakeSource(SYSTEM_CLOCK)
    async with serving(source) as server:
        address = RouterAddress(router=url_of(server))
        top = Top(address.router, lambda: events(address))
        async with top.run_test(size=(100, 30)) as pilot:
            await until(top, "1 P  1 D")
            assert [row[1] for row in cells(top)] == ["decode-0", "prefill-0"]
            source.views[1] |= {"state": "down", "alive": False}
            await until(top, "decode-0 is down (before: up)")
            await pilot.press("s")
            assert cells(top)[0][2] == "down"
            server.stop()
            await until(top, "lost since")
            await pilot.press("q")
        assert top.failure == ""


async def test_names_of_others_are_text() -> None:
    source = FakeSource(SYSTEM_CLOCK)
    source.views = [view("[red]" + HOSTILE, "decode"), view("[/b]", "prefill")]
    source.names = ["[/]", "[link=x]"]
    async with serving(source) as server:
        address = RouterAddress(router=url_of(server))
        top = Top(address.router, lambda: events(address))
        async with top.run_test(size=(200, 30)):
            await until(top, "[link=x]")
            assert cells(top)[0][1].replace("\\", "") in ("[/b]", "[red]" + HOSTILE)


async def test_figures_once_as_json() -> None:
    source = FakeSource(SYSTEM_CLOCK)
    source.texts = {"decode-0": b"vllm:num_requests_running 4\n"}
    async with serving(source) as server:
        shown = json.loads(await once(RouterAddress(router=url_of(server))))
    assert {instance["name"]: instance.get("running") for instance in shown["instances"]}["decode-0"] == 4.0
    assert shown["models"] == ["model"]


async def test_a_key_is_needed_where_there_is_one() -> None:
    async with serving(FakeSource(SYSTEM_CLOCK), admin_key="secret-key") as server:
        with pytest.raises(ConfigError, match="needs its admin key"):
            await once(RouterAddress(router=url_of(server), admin_key="wrong"))
        assert json.loads(await once(RouterAddress(router=url_of(server), admin_key="secret-key")))["instances"]


async def test_a_router_is_found() -> None:
    async with serving(FakeSource(SYSTEM_CLOCK)) as server:
        assert await find(["http://127.0.0.1:1", url_of(server)]) == url_of(server)
    with pytest.raises(ConfigError, match="give its URL"):
        await find(["http://127.0.0.1:1"])
