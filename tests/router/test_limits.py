"""Instances that hang, stall, trickle or talk nonsense: another is asked in time, and nobody waits without end."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.responses import StreamingResponse

from kvferry.router.instances.instance import InstanceState
from router.peers import (
    CONCURRENT,
    DECODE,
    Peer,
    answer,
    answer_late,
    answer_when_told,
    event,
    instances,
    routing,
    ticket_when_told,
)
from router.request.test_hand_off import BODY, MODES, a_decode, a_prefill, get, post
from support.waiting import eventually

SOON: dict[str, Any] = {
    "first_byte_timeout_s": 0.2,
    "between_bytes_timeout_s": 0.2,
    "answer_timeout_s": 30,
    "health_timeout_s": 0.3,
    "release_timeout_s": 0.3,
}
"""Limits for tests; a body adds a tenth of a second to the first."""

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Broken:
    """A server of raw bytes. It answers for its health and, with `facts`, about itself; a completion is `script`'s."""

    def __init__(self, script: Script, facts: dict[str, Any] | None = None) -> None:
        self._script, self._facts = script, facts
        self.url = ""
        self.num_completions = 0
        self.gone = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            if path == "/health":
                await send(writer, 200, b"{}")
            elif path == "/kvferry/instance" and self._facts is not None:
                await send(writer, 200, json.dumps(self._facts).encode())
            elif path.startswith("/v1/completions"):
                self.num_completions += 1
                await self._script(reader, writer)
            else:
                await until_gone(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.gone.set()
            writer.close()


async def send(writer: asyncio.StreamWriter, status: int, body: bytes, *headers: str) -> None:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    await writer.drain()


async def until_gone(reader: asyncio.StreamReader) -> None:
    while await reader.read(65536):
        pass


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts, and never answers."""
    await until_gone(reader)


async def headers_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins an answer of which nothing follows."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    await until_gone(reader)


async def half_a_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stops in the middle of its answer."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"choices"')
    await until_gone(reader)


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speaks something else."""
    writer.write(b"\x16\x03\x01 SSH-2.0-what\r\n\r\n\x00\xff")
    await writer.drain()


async def two_lengths(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An answer whose end is a matter of opinion."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 7\r\n\r\n{}extra")
    await writer.drain()


async def huge_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """More headers than anyone reads."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not reader.at_eof():
        writer.write(b"X-More: " + b"x" * 8000 + b"\r\n")
        await writer.drain()


async def endless_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An answer without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"x" * 2**20
    while not reader.at_eof():
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()


async def no_json(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """200, and nothing that could be a ticket."""
    await send(writer, 200, b'{"kv_transfer_params": "\xff\xff' + b"[" * 5000)


SILENT = [silence, headers_only]
NONSENSE = [garbage, two_lengths, huge_headers, no_json]


# Prefill instances.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [*SILENT, half_a_body, *NONSENSE, endless_body])
async def test_a_prefill_that_gives_no_answer_is_replaced_by_another(mode: str, script: Script) -> None:
    bad, good, d = Broken(script, CONCURRENT), a_prefill(), a_decode(answer_late)
    async with (
        bad.serving(),
        instances(good, d),
        routing([bad.url, good.url], [d.url], hand_off=mode, **SOON) as (_, url),
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(post(url))
        await good.called.wait()
        d.go.set()
        status, body, _ = await asked
        await bad.gone.wait()
    assert (status, body["choices"][0]["text"]) == (200, "done")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [silence, half_a_body])
async def test_without_another_prefill_decode_does_both(mode: str, script: Script) -> None:
    bad, d = Broken(script, CONCURRENT), a_decode(answer_if_whole)
    async with bad.serving(), instances(d), routing([bad.url], [d.url], hand_off=mode, **SOON) as (_, url):
        assert (await post(url))[0] == 200
        assert 'kind="local",reason=""} 1.0' in (await get(url, "/metrics"))[1]
    assert d.calls[-1].body == BODY


async def answer_if_whole(peer: Peer, request: Any, body: Any) -> Any:
    """D: waits for ever for KV that it is to fetch."""
    return await (answer_late if "kv_transfer_params" in body else answer)(peer, request, body)


@pytest.mark.parametrize("mode", MODES)
async def test_a_prefill_that_gave_no_answer_is_left_out_until_it_answers_again(mode: str) -> None:
    answers = asyncio.Event()

    async def answer_once_well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answers.is_set():
            await send(writer, 200, b'{"choices": []}')
        else:
            await until_gone(reader)

    bad, d = Broken(answer_once_well, CONCURRENT), a_decode(answer_if_whole)
    async with (
        bad.serving(),
        instances(d),
        routing([bad.url], [d.url], hand_off=mode, health_interval_s=0.05, **SOON) as (router, url),
    ):
        (prefill,) = router.services.pools.prefill.instances
        assert (await post(url))[0] == 200
        assert prefill.state is InstanceState.UNRESPONSIVE
        begun = bad.num_completions
        assert (await post(url))[0] == 200
        assert 'reason="no_prefill"} 1.0' in (await get(url, "/metrics"))[1]
        answers.set()
        await eventually(lambda: prefill.state is InstanceState.UP)
        assert bad.num_completions > begun


# Decode instances.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [*SILENT, garbage, huge_headers])
async def test_a_decode_that_gives_no_answer_is_replaced_and_its_ticket_goes_on(mode: str, script: Script) -> None:
    p, bad, good = a_prefill(), Broken(script, DECODE), a_decode()
    async with (
        bad.serving(),
        instances(p, good),
        routing([p.url], [bad.url, good.url], hand_off=mode, **SOON) as (_, url),
    ):
        assert (await post(url))[0] == 200
        await bad.gone.wait()
        assert bad.num_completions == 1
        assert (await post(url))[0] == 200
    if script in SILENT:
        assert bad.num_completions == 1
    transfer_id = p.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert good.calls[0].body["kv_transfer_params"]["transfer_id"] == transfer_id
    assert p.released.empty()


@pytest.mark.parametrize("mode", MODES)
async def test_without_another_decode_it_is_a_timeout_and_p_is_told(mode: str) -> None:
    p, bad = a_prefill(), Broken(silence, DECODE)
    async with bad.serving(), instances(p), routing([p.url], [bad.url], hand_off=mode, **SOON) as (_, url):
        status, body, _ = await post(url)
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert (status, body["error"]["code"]) == (504, "instance_silent")
    assert "127.0.0.1" not in json.dumps(body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/models"])
async def test_every_path_has_limits(path: str) -> None:
    bad = Broken(silence)
    async with (
        bad.serving(),
        routing([], [bad.url], **SOON) as (_, url),
        aiohttp.ClientSession() as session,
        session.request("GET" if path.endswith("models") else "POST", url + path, json=BODY) as response,
    ):
        assert response.status == 504


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_that_stops_ends_with_an_error_event(mode: str) -> None:
    p, d = a_prefill(), a_decode(answer_when_told)
    async with instances(p, d), routing([p.url], [d.url], hand_off=mode, **SOON) as (_, url):
        status, text, _ = await post(url, {**BODY, "stream": True})
        await d.disconnected.wait()
        await p.released.get()
    assert status == 200
    first, last, done = [line for line in text.split("\n\n") if line]
    assert first == event("one").decode().strip()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_silent"
    assert done == "data: [DONE]"


async def test_an_unstreamed_answer_that_stops_does_not_look_complete() -> None:
    bad = Broken(half_a_body)
    async with bad.serving(), routing([], [bad.url], **SOON) as (_, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json=BODY) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


async def test_a_decode_that_trickles_is_let_go_on() -> None:
    """Each chunk in time, the whole far over the limit between two."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for number in range(8):
            writer.write(event(str(number)))
            await writer.drain()
            await asyncio.sleep(0.1)

    slow = Broken(trickle)
    async with slow.serving(), routing([], [slow.url], **{**SOON, "between_bytes_timeout_s": 0.4}) as (_, url):
        status, text, _ = await post(url, {**BODY, "stream": True})
    assert status == 200
    assert text == "".join(event(str(number)).decode() for number in range(8))


async def test_an_endless_answer_ends_with_its_client() -> None:
    endless = Broken(endless_body)
    async with endless.serving(), routing([], [endless.url]) as (_, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json=BODY) as response:
            await response.content.readexactly(10 * 2**20)
        await endless.gone.wait()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_an_error_without_an_end_is_not_read_to_its_end(path: str) -> None:
    async def endless_error(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 No\r\nContent-Type: application/json\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"x" * 2**20)
            await writer.drain()

    bad = Broken(endless_error)
    async with bad.serving(), routing([], [bad.url], **SOON) as (_, url):
        assert (await post(url, path=path))[0] in (502, 504)


# Who works is waited for.


async def test_an_instance_that_counts_its_steps_is_waited_for() -> None:
    """Much longer than its limit, until it answers; one whose count stands still is given up."""
    steps = 0

    async def metrics(peer: Peer) -> str:
        nonlocal steps
        steps += counts
        return f'kvferry:engine_steps_total{{model_name="m"}} {steps}.0\n'

    for counts, status in ((1, 200), (0, 504)):
        d = Peer("decode", answer_late, metrics=metrics)
        async with instances(d), routing([], [d.url], **SOON) as (_, url), asyncio.TaskGroup() as group:
            asked = group.create_task(post(url))
            if counts:
                await eventually(lambda: steps > 20)
                d.go.set()
            assert (await asked)[0] == status


async def test_answers_for_others_are_signs_of_work_until_the_last_limit() -> None:
    async def stream_for_some(peer: Peer, request: Any, body: Any) -> Any:
        return await (endless_events if body.get("stream") else answer_late)(peer, request, body)

    d = Peer("decode", stream_for_some)
    limits = {**SOON, "answer_timeout_s": 1.0}
    async with instances(d), routing([], [d.url], **limits) as (router, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json={**BODY, "stream": True}) as response:
            await response.content.readany()
            begun = asyncio.get_running_loop().time()
            assert (await post(url))[0] == 504
            assert asyncio.get_running_loop().time() - begun >= 1.0
    assert router.services.legs.num_open == 0


async def endless_events(peer: Peer, request: Any, body: Any) -> Any:
    async def events() -> AsyncIterator[bytes]:
        while True:
            yield event("more")
            await asyncio.sleep(0.02)

    return StreamingResponse(events(), media_type="text/event-stream")


async def test_decode_may_be_silent_while_prefill_works() -> None:
    """In a concurrent hand-off D waits for P, so D's limit begins when P is done."""
    steps = 0

    async def metrics(peer: Peer) -> str:
        nonlocal steps
        steps += 1
        return f"kvferry:engine_steps_total {steps}\n"

    p = Peer("prefill", ticket_when_told, facts=CONCURRENT, metrics=metrics)
    d = a_decode(answer_late)
    limits = {**SOON, "first_byte_timeout_s": 1.0}
    async with instances(p, d), routing([p.url], [d.url], **limits) as (_, url), asyncio.TaskGroup() as group:
        asked = group.create_task(post(url))
        await eventually(lambda: steps > 6 or asked.done())  # they are read in turns of the limit's fourth
        p.go.set()
        d.go.set()
        assert (await asked)[0] == 200
    assert len(p.calls) == len(d.calls) == 1


# Who stands still is noticed.


async def test_an_instance_that_does_not_answer_for_its_health_is_avoided_and_taken_back() -> None:
    p, bad, good = a_prefill(), a_decode(), a_decode()
    settings = {"health_interval_s": 0.05, "health_timeout_s": 0.5}
    async with instances(p, bad, good), routing([p.url], [bad.url, good.url], **settings) as (router, url):
        first, _ = router.services.pools.decode.instances
        bad.hangs = True
        await eventually(lambda: first.checks.num_late > 0)
        num_before = len(bad.calls)
        for _ in range(4):
            assert (await post(url))[0] == 200
        await eventually(lambda: not first.usable)
        assert len(bad.calls) == num_before
        bad.hangs = False
        await eventually(lambda: first.usable)
        for _ in range(2):
            assert (await post(url))[0] == 200
        assert len(bad.calls) > num_before


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_that_wait_for_an_instance_that_stands_still_go_elsewhere(role: str) -> None:
    """Long before their own limit: its health tells."""

    async def hang(peer: Peer, request: Any, body: Any) -> Any:
        peer.hangs = True
        return await answer_late(peer, request, body)

    bad = Peer(role, hang, facts=CONCURRENT if role == "prefill" else DECODE)
    other = a_prefill() if role == "decode" else a_decode()
    more = [a_decode()] if role == "decode" else []
    settings = {"health_interval_s": 0.05, "health_timeout_s": 0.1, "hand_off": "sequential"}
    prefill, decode = ([other], [bad, *more]) if role == "decode" else ([bad], [other])
    async with (
        instances(bad, other, *more),
        routing([one.url for one in prefill], [one.url for one in decode], **settings) as (_, url),
    ):
        assert (await post(url))[0] == 200
        await bad.disconnected.wait()


async def test_who_answers_for_its_health_and_nothing_else_is_not_asked() -> None:
    mute, d = Broken(silence), a_decode()
    settings = {"health_interval_s": 0.02, "health_timeout_s": 0.5}
    async with mute.serving(), instances(d), routing([mute.url], [d.url], **settings) as (router, url):
        (prefill,) = router.services.pools.prefill.instances
        await eventually(lambda: not prefill.usable)
        assert (await post(url))[0] == 200
    assert mute.num_completions == 0


# One request's fault is its own.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "point",
    [
        "edge.endpoints.Endpoints.read",
        "request.exchange.make_plan",
        "choice.placement.Placement.form",
        "request.request_legs.prefill_body",
        "request.request_legs.decode_body",
        "request.request_legs.LegHeaders.with_extra",
        "request.exchange.Exchange._hand_off",
        "request.record.RequestRecord.prefilled",
        "request.delivery.Delivery.send",
        "request.hand_off.prefill_usage",
        "choice.chooser.Chooser.choose",
        "choice.placement.Placement.next_prefill",
        "request.hand_off.HandOff._on_leg_change",
        "request.hand_off.inspect_ticket",
        "request.relay.for_client",
        "request.relay.Relay.send",
        "request.leg.verdict",
        "request.leg.Leg._begin",
        "request.leg.Leg.relay",
        "request.leg.Leg.take",
        "request.leg.Legs.send",
    ],
)
async def test_an_exception_in_one_request_is_that_requests_error(
    point: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hold_some(peer: Peer, request: Any, body: Any) -> Any:
        return await (answer_when_told if body.get("hold") else answer)(peer, request, body)

    monkeypatch.setattr("kvferry.router.instances.connections.Connections.idle_connection_s", 60.0)
    p, d = a_prefill(), a_decode(hold_some)
    async with (
        instances(p, d),
        routing([p.url], [d.url], health_interval_s=60) as (router, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**BODY, "stream": True, "hold": True}) as running,
    ):
        assert await running.content.readany() == event("one")
        assert (await post(url))[0] == 200  # over connections that are free from now on
        with monkeypatch.context() as patched:
            patched.setattr(f"kvferry.router.{point}", fail_for(point))
            status, body, _ = await post(url, {**BODY, "stream": stream})
        if status == 200 and not stream:
            assert point == "request.leg.Leg.relay"  # a whole answer that is here does not go that way
        elif status == 200:  # the hand-off was given up, or the stream had begun
            assert "error" in body
        else:
            assert (status, body["error"]["type"]) in ((500, "server_error"), (502, "bad_gateway_error"))
        assert (await post(url))[0] == 200
        d.go.set()
        assert (await running.content.read()).endswith(b"data: [DONE]\n\n")
        await eventually(lambda: router.services.legs.num_open == 0)


def fail_for(point: str) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        for one in filter(inspect.iscoroutine, arguments):
            one.close()  # nobody else will
        raise ZeroDivisionError(point)

    return fail


async def test_an_exception_in_a_look_or_a_release_leaves_the_router_running(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = a_prefill(), a_decode()
    raised = asyncio.Event()

    async def fail(*arguments: Any, **options: Any) -> Any:
        raised.set()
        raise UnicodeError("a..b")

    async with instances(p, d), routing([p.url], [d.url], health_interval_s=0.02) as (router, url):
        with monkeypatch.context() as patched:
            patched.setattr("kvferry.router.instances.connections.Connections.ask", fail)
            await raised.wait()
            router.services.releases.start(router.services.pools.prefill.instances[0], "x")
            await eventually(
                lambda: 'releases_total{outcome="failed"} 1.0' in router.services.metrics.expose([]).decode()
            )
        assert (await post(url))[0] == 200
