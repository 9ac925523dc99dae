"""The page in a real browser: what it shows, for whom, and what it does not let others do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.messages.traffic import RequestObservation
from kvferry.http.server.http_server import HttpServer
from support.browser import Browser, chromium, require_chromium
from support.page_server import HOSTILE, Answers, serving, url_of
from support.page_source import FakeSource, record, view
from support.waiting import eventually

AXE = Path(__file__).parents[2] / ".browser" / "axe.min.js"
SERIOUS = """;
const done = arguments[arguments.length - 1], serious = ["serious", "critical"];
axe.run(document).then((found) => done(found.violations.filter((violation) => serious.includes(violation.impact))
  .map((violation) => `${violation.id}: ${violation.nodes[0].html}`)));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    require_chromium()
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


async def on(browser: Browser, what: str, *arguments: Any) -> Any:
    """Call a method of the browser's in a thread: the page needs this event loop."""
    return await asyncio.to_thread(getattr(browser, what), *arguments)


async def shown(browser: Browser, server: HttpServer) -> None:
    await on(browser, "open", "about:blank")
    await on(browser, "open", url_of(server) + "/")
    await on(browser, "wait", "return document.querySelector('#list-d b') !== null")


async def test_it_shows_instances_their_changes_and_requests(browser: Browser) -> None:
    source = FakeSource(SYSTEM_CLOCK)
    now = time.time()
    source.requests = [
        RequestObservation(now - 1, 100, 80, "done", True, "prefill-0", "decode-0", 0.1, 80, 0.2, 0.05, 1.0, 20)
    ]
    source.records = [record("request-1", now - 1)]
    async with serving(source) as server:
        await shown(browser, server)
        assert "1 P · 1 D" in await on(browser, "text", "#about")
        source.views[1] |= {"state": "down", "alive": False}
        await on(browser, "wait", "return document.querySelector('#list-d .state').innerText === 'down'")
        await on(
            browser, "wait", "return document.querySelector('#events').innerText.includes('error: decode-0 is down')"
        )
        await on(browser, "run", "document.querySelector('#tab-requests').click()")
        await on(browser, "wait", "return document.querySelector('#rows tr') !== null")
        await on(browser, "run", "document.querySelector('#rows tr').click()")
        detail = await on(browser, "text", "#detail")
        assert "prefill on prefill-0, decode on decode-0" in detail
        assert "prefill prefill-0: 0.25" in detail
        await on(browser, "open", url_of(server) + "/?again#request=request-1")
        await on(browser, "wait", "return document.querySelector('#detail').innerText.includes('request-1')")
        assert await on(browser, "log") == []


async def test_a_chat_shows_each_gap_and_the_request_as_code(browser: Browser) -> None:
    async with serving(FakeSource(SYSTEM_CLOCK)) as server:
        await shown(browser, server)
        await on(
            browser, "run", "document.querySelector('#tab-chat').click(); document.querySelector('#prompt').value='Hi'"
        )
        await on(browser, "run", "document.querySelector('#ask').requestSubmit()")
        await on(browser, "wait", "return document.querySelector('#log').innerText.includes('{{7*7}}')")
        assert "TTFT" in await on(browser, "text", "#log")
        assert "/v1/chat/completions" in await on(browser, "run", "return document.querySelector('#curl').textContent")
        assert not await on(browser, "run", "return window.attacked")


async def test_there_is_no_chat_where_the_listener_serves_no_models(browser: Browser) -> None:
    async with serving(FakeSource(SYSTEM_CLOCK), has_chat=False) as server:
        await shown(browser, server)
        await on(browser, "wait", "return document.querySelector('#tab-chat').hidden")
        await on(browser, "run", "document.querySelector('#tab-fleet').focus()")
        await on(browser, "press", "\ue014", "\ue014")  # right twice: to the requests, and round to the fleet
        assert await on(browser, "run", "return document.activeElement.id") == "tab-fleet"


async def test_an_instance_shows_its_revision_and_the_tiers_of_its_store(browser: Browser) -> None:
    source = FakeSource(SYSTEM_CLOCK)
    source.views[1] |= {"revision": "3f2a"}
    source.texts = {
        "decode-0": b"kvferry:connector_tier0_kept_bytes 2e6\nkvferry:connector_tier1_kept_bytes 3e9\n"
        b"kvferry:connector_tier1_healthy 0\nkvferry:connector_tier1_loaded_blocks_total 12\n"
    }
    async with serving(source) as server:
        await shown(browser, server)
        await on(browser, "wait", "return document.querySelector('#list-d').innerText.includes('tier 1')")
        text = await on(browser, "text", "#list-d")
        assert "revision 3f2a" in text
        assert "tier 0: 2 MB kept" in text
        assert "tier 1: does not answer · 3 GB kept · 12 blocks loaded" in text
        assert not await on(browser, "run", "return document.querySelector('#card-tiers').hidden")


async def test_names_and_texts_of_others_run_no_script(browser: Browser) -> None:
    source = FakeSource(SYSTEM_CLOCK)
    source.names = [HOSTILE]
    source.views = [
        view(HOSTILE, "prefill", no_hand_off=HOSTILE),
        view(HOSTILE + "2", HOSTILE, state=HOSTILE, engine=HOSTILE),
    ]
    source.records = [record(HOSTILE, 1.0, model=HOSTILE, reason=HOSTILE, path=HOSTILE, decode=HOSTILE, policy=HOSTILE)]
    async with serving(source) as server:
        await shown(browser, server)
        await on(browser, "run", "document.querySelector('#tab-requests').click()")
        await on(browser, "wait", "return document.querySelector('#rows tr') !== null")
        await on(browser, "run", "document.querySelector('#rows tr').click()")
        assert HOSTILE in await on(browser, "text", "#detail")
        await on(browser, "run", "document.querySelector('#tab-fleet').click()")
        assert not await on(browser, "run", "return window.attacked")
        injected = (
            "const s = document.createElement('script'); s.textContent = 'window.attacked = 1'; document.body.append(s)"
        )
        await on(browser, "run", injected)
        assert not await on(
            browser, "run", "return window.attacked"
        )  # the policy holds for what gets in some other way
        await on(browser, "log")


async def test_a_stranger_sees_nothing_and_a_key_opens_it(browser: Browser) -> None:
    source, answers = FakeSource(SYSTEM_CLOCK), Answers()
    async with serving(source, answers, admin_key="secret-key") as server:
        await on(browser, "open", url_of(server) + "/")
        await on(browser, "wait", "return !document.querySelector('#login').hidden")
        page = await on(browser, "run", "return document.documentElement.outerHTML")
        assert "decode-0" not in page
        enter = "document.querySelector('#key').value = arguments[0]; document.querySelector('#login').requestSubmit()"
        await on(browser, "run", enter, "wrong")
        await on(browser, "wait", "return document.querySelector('#login-error').innerText.includes('not valid')")
        await on(browser, "run", enter, "secret-key")
        await on(browser, "wait", "return document.querySelector('#list-d b') !== null")
        assert "secret-key" not in await on(browser, "run", "return document.documentElement.outerHTML + location.href")
        await on(browser, "run", "window.confirm = () => true; document.querySelector('#list-d .row button').click()")
        async with asyncio.timeout(10):
            await eventually(lambda: answers.calls)
        assert answers.calls == [("/kvferry/instances/drain", b'{"instance":"decode-0"}', True)]
        await on(browser, "run", "sessionStorage.clear()")
        await on(browser, "log")


async def test_another_page_cannot_use_it(browser: Browser) -> None:
    answers = Answers()
    async with serving(FakeSource(SYSTEM_CLOCK), answers) as server, serving(FakeSource(SYSTEM_CLOCK)) as other:
        await shown(browser, other)
        script = (
            "const done = arguments[arguments.length - 1];"
            "fetch(arguments[0], {headers: {authorization: 'Bearer x'}})"
            ".then((answer) => answer.text()).then(done, () => done('refused'))"
        )
        assert await on(browser, "run_async", script, url_of(server) + "/kvferry/page/feed") == "refused"
        await on(browser, "log")


async def test_with_an_admin_listener_it_is_there_only() -> None:
    async with (
        serving(FakeSource(SYSTEM_CLOCK), admin_key="k", admin_port=0) as server,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(url_of(server) + "/") as answer:
            assert answer.status == 404
        async with session.get(f"http://127.0.0.1:{server.ports[1]}/") as answer:
            assert answer.status == 200
        async with session.get(f"http://127.0.0.1:{server.ports[1]}/kvferry/page/feed") as answer:
            assert answer.status == 401


async def test_it_comes_back_with_its_server(browser: Browser) -> None:
    source = FakeSource(SYSTEM_CLOCK)
    async with serving(source) as server:
        await shown(browser, server)
        port = server.ports[0]
    await on(browser, "wait", "return document.querySelector('#banner').innerText.includes('Not connected since')")
    source.views[1] |= {"in_flight": 7}
    async with serving(source, port=port):
        await on(browser, "wait", "return document.querySelector('#banner').hidden")
        await on(browser, "wait", "return document.querySelector('#list-d').innerText.includes('7 running')")
        await on(browser, "log")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_used_by_keyboard_on_a_narrow_screen(browser: Browser, scheme: str) -> None:
    source = FakeSource(SYSTEM_CLOCK)
    source.records = [record(f"request-{index}", time.time() - index) for index in range(30)]
    source.views += [view(f"decode-{index}", "decode", no_hand_off="another model") for index in range(1, 5)]
    async with serving(source) as server:
        await on(browser, "prefer", scheme)
        await on(browser, "resize", 360, 740)
        await shown(browser, server)
        for tab in ("fleet", "requests", "chat"):
            await on(browser, "run", f"document.querySelector('#tab-{tab}').focus()")
            await on(browser, "press", "\ue007")
            await on(browser, "wait", f"return !document.querySelector('#view-{tab}').hidden")
            await asyncio.sleep(0.2)
            assert await on(browser, "run", "return document.documentElement.scrollWidth") == 360
            if AXE.exists():
                script = AXE.read_text() + SERIOUS
                assert await on(browser, "run_async", script) == []
        await on(browser, "run", "document.querySelector('#tab-fleet').focus()")
        await on(browser, "press", "\ue014")
        assert not await on(browser, "run", "return document.querySelector('#view-requests').hidden")
        await on(browser, "run", "document.querySelector('#rows tr').focus()")
        await on(browser, "press", "\ue007")
        assert "prefill on prefill-0" in await on(browser, "text", "#detail")
        await on(browser, "resize", 1200, 900)


async def test_a_page_is_no_reason_to_stay_when_the_server_stops() -> None:
    async with serving(FakeSource(SYSTEM_CLOCK)) as server, aiohttp.ClientSession() as session:
        answer = await session.get(url_of(server) + "/kvferry/page/feed")
        assert (await answer.content.readline()).startswith(b'data: {"type":"snapshot"')
        server.stop()
        async with asyncio.timeout(5):
            await answer.content.read()  # the end of the stream, not a broken connection
