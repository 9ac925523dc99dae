"""Several router processes on one port, and several routers before the same instances."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kvferry.fleet.processes.ready import InstanceReady, start_messages
from router.peers import CONCURRENT, DECODE, Peer, answer, answer_when_told, chat, event, instances, routing, ticket
from support.certificates import Authority
from support.processes import is_running
from support.waiting import eventually

SERVE = """
import asyncio, json, sys
from pathlib import Path
from kvferry.cli.serving.attended import AttendedFleet
from kvferry.fleet.spec.fleet_settings import FleetSettings, failing
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.fleet_spec import RouterSpec, DesiredFleet
from kvferry.fleet.display import ReportingDisplay
from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.fleet.processes.recipe import LocalRecipe
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import FleetShapeSettings, ListenSettings
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.router.config import RouterConfig

prefill, decode, settings = json.loads(sys.argv[1])
policy = RestartPolicy(hang_timeout_s=settings.pop("hang_timeout_s", 60.0))
paths = ("_file", "_cert", "_key")
settings = {name: Path(value) if name.endswith(paths) else value for name, value in settings.items()}
access = {name: settings.pop(name) for name in ("api_key_file", "tls_cert", "tls_key") if name in settings}
limits = HttpLimits(**{name: settings.pop(name) for name in [*settings] if name.startswith("http_")})
listen = ListenSettings(port=settings.pop("port", 0))
router = RouterConfig(prefill_url=tuple(prefill), decode_url=tuple(decode), **settings)
fleet = DesiredFleet(
    name="routers",
    model="",
    mode="pooling",
    router=RouterSpec(count=router.workers, host=listen.host, port=listen.port),
    failure=failing(policy),
)
settings = FleetSettings(
    spec=FleetShapeSettings(),
    engine=EngineConfig(model=""),
    router=router,
    listen=listen,
    access=HttpAccess(admin_key=("operator",), **access),
    limits=limits,
)
recipe = LocalRecipe(fleet=fleet, settings=settings)
attended = AttendedFleet(fleet, lambda _: recipe, ReportingDisplay(ReadyWriter(1)), token="", grace_s=30.0)
sys.exit(asyncio.run(attended.run()))
"""

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello"}
OPERATOR = {"Authorization": "Bearer operator"}
TOKEN = "the token of tests"


class Workers:
    """A router with several of them, as a process of its own."""

    def __init__(self, process: Process, url: str, pids: list[int]) -> None:
        self.process, self.url, self.pids = process, url, pids

    def worker_of(self, session_port: int) -> int:
        """The process that has the other end of a client's connection."""
        for pid in self.now():
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.raddr and one.raddr.port == session_port:
                    return pid
        raise AssertionError("nobody has this connection")

    def now(self) -> list[int]:
        """The workers' process ids."""
        return [one.pid for one in psutil.Process(self.process.pid).children()]

    def num_listening(self) -> int:
        """How many workers take connections."""
        num = 0
        for pid in self.now():
            with suppress(psutil.NoSuchProcess):
                found = psutil.Process(pid).net_connections("tcp")
                # The one that all inherit, and its own for the others, which it opens once it is about to serve.
                num += sum(one.status == psutil.CONN_LISTEN for one in found) == 2
        return num

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """An operator's request, over a connection of its own."""
        async with aiohttp.ClientSession(headers=OPERATOR) as session:
            async with session.request(method, self.url + path, json=body) as response:
                return response.status, await response.read()

    async def names(self) -> list[str]:
        """Of all instances."""
        _, body = await self.ask("GET", "/kvferry/instances")
        return sorted(one["name"] for one in json.loads(body)["instances"])


@asynccontextmanager
async def workers(
    prefill: list[str], decode: list[str], num: int = 2, log: Path | None = None, **settings: Any
) -> AsyncIterator[Workers]:
    """Their parent writes its errors to `log`."""
    said = json.dumps([prefill, decode, {"workers": num, **settings}], default=str)
    with log.open("wb") if log is not None else nullcontext() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SERVE,
            said,
            stdout=PIPE,
            stderr=errors,
            env={**os.environ, "KVFERRY_AUTH_TOKEN": TOKEN},
        )
    assert process.stdout is not None
    try:
        router = Workers(process, await url_of(process), [])
        router.pids = router.now()
        yield router
    finally:
        if process.returncode is None:
            process.terminate()
        assert await process.wait() in (0, -signal.SIGKILL)


async def url_of(process: Process) -> str:
    """Where they serve, once they do."""
    assert process.stdout is not None
    messages = start_messages()
    while data := await process.stdout.read(4096):
        for message in messages.feed(data):
            if isinstance(message, InstanceReady):
                return message.url
    raise AssertionError("the routers did not start")


async def complete(router: Workers, **more: Any) -> int:
    async with aiohttp.ClientSession() as session:
        async with session.post(router.url + "/v1/completions", json={**BODY, **more}, ssl=False) as response:
            await response.read()
            return response.status


async def test_figures_and_decisions_are_those_of_all_workers() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with instances(p, d), workers([p.url], [d.url]) as router:
        assert Counter([await complete(router) for _ in range(24)]) == {200: 24}
        _, text = await router.ask("GET", "/metrics")
        assert b'kvferry_router_requests_total{path="/v1/completions",status="200"} 24.0' in text
        assert text.count(b"# TYPE kvferry_router_requests_total counter") == 1
        _, decisions = await router.ask("GET", "/kvferry/decisions?limit=50")
        routed = [one["timings"]["routed"] for one in json.loads(decisions)["decisions"]]
        assert len(routed) == 24
        assert routed == sorted(routed, reverse=True)
        assert (await router.ask("GET", "/kvferry/decisions?limit=x"))[0] == 400
        _, traffic = await router.ask("GET", "/kvferry/traffic?limit=3")
        assert [len(json.loads(traffic)["requests"]), json.loads(traffic)["num_arrived"]] == [3, 24]
        for wrong in ("limit=-1", "limit=1&limit=2", "limit=", "seconds=nan"):
            assert (await router.ask("GET", f"/kvferry/traffic?{wrong}"))[0] == 400, wrong


async def test_all_workers_have_the_stored_responses() -> None:
    """Each request has a connection of its own, which the kernel gives to any worker."""
    d = Peer("decode", chat)
    async with instances(d), workers([], [d.url]) as router:
        _, content = await router.ask("POST", "/v1/responses", {"input": "x"})
        response = json.loads(content)
        for _ in range(20):
            assert await router.ask("GET", f"/v1/responses/{response['id']}") == (200, content)
        for _ in range(20):
            body = {"input": "And now?", "previous_response_id": response["id"]}
            status, content = await router.ask("POST", "/v1/responses", body)
            assert status == 200
            assert len(d.calls[-1].body["messages"]) == 3


async def test_operators_reach_all_workers_and_a_new_one_knows_what_they_did() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    more = Peer("decode", answer, facts=DECODE)
    async with instances(p, d, more), workers([p.url], [d.url], 3) as router:
        status, body = await router.ask("POST", "/kvferry/instances/add", {"role": "decode", "url": more.url})
        assert (status, json.loads(body)["name"]) == (200, "decode-1")
        assert await router.names() == ["decode-0", "decode-1", "prefill-0"]
        assert (await router.ask("POST", "/kvferry/instances/drain", {"instance": "nobody"}))[0] == 404
        await eventually(lambda: _everyone_serves(router, more))
        assert (await router.ask("POST", "/kvferry/instances/remove", {"instance": d.url, "force": True}))[0] == 200
        await eventually(lambda: _nobody_serves(router, d))

        lost = router.pids[0]
        os.kill(lost, signal.SIGKILL)
        await eventually(lambda: len(router.now()) == 3 and lost not in router.now())
        await eventually(lambda: _names_are(router, ["decode-1", "prefill-0"]))
        d.calls.clear()
        assert {await complete(router) for _ in range(12)} == {200}
        assert not d.calls


async def _everyone_serves(router: Workers, peer: Peer) -> bool:
    """Whether requests over any connection may go to `peer`."""
    peer.calls.clear()
    for number in range(12):
        await complete(router, prompt=f"{number} " * 200)
    return bool(peer.calls)


async def _nobody_serves(router: Workers, peer: Peer) -> bool:
    return not await _everyone_serves(router, peer)


async def _names_are(router: Workers, names: list[str]) -> bool:
    status, body = await router.ask("GET", "/kvferry/instances")
    return status == 200 and sorted(one["name"] for one in json.loads(body)["instances"]) == names


async def test_a_worker_that_dies_harms_no_stream_of_another() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer_when_told, facts=DECODE)
    async with (
        instances(p, d),
        workers([p.url], [d.url]) as router,
        aiohttp.ClientSession() as session,
        session.post(router.url + "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert await response.content.readany() == event("one")
        assert response.connection is not None
        assert response.connection.transport is not None
        own = router.worker_of(response.connection.transport.get_extra_info("sockname")[1])
        (other,) = set(router.now()) - {own}
        os.kill(other, signal.SIGKILL)
        await eventually(lambda: len(router.now()) == 2 and other not in router.now())
        d.go.set()
        assert await response.content.read() == event("two") + b"data: [DONE]\n\n"


async def test_what_a_lost_worker_had_under_way_is_not_counted_any_more() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer_when_told, facts=DECODE)
    async with instances(p, d), workers([p.url], [d.url]) as router, aiohttp.ClientSession() as session:
        async with session.post(router.url + "/v1/completions", json={**BODY, "stream": True}) as response:
            assert await response.content.readany() == event("one")
            await eventually(lambda: _in_flight_is(router, 1))
            assert response.connection is not None
            assert response.connection.transport is not None
            os.kill(router.worker_of(response.connection.transport.get_extra_info("sockname")[1]), signal.SIGKILL)
            await eventually(lambda: _in_flight_is(router, 0))


async def _in_flight_is(router: Workers, number: int) -> bool:
    try:
        status, body = await router.ask("GET", "/kvferry/instances")
    except aiohttp.ClientError:
        return False  # it came to the worker that is gone
    found = {one["name"]: one for one in json.loads(body).get("instances", [])}
    return status == 200 and found["decode-0"]["in_flight"] == number


async def test_a_signal_has_all_workers_finish_what_they_do() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer_when_told, facts=DECODE)
    async with instances(p, d), workers([p.url], [d.url], 3) as router, aiohttp.ClientSession() as session:
        async with session.post(router.url + "/v1/completions", json={**BODY, "stream": True}) as response:
            assert await response.content.readany() == event("one")
            router.process.terminate()
            await eventually(lambda: len(router.now()) == 1)  # those without a request are gone
            d.go.set()
            assert await response.content.read() == event("two") + b"data: [DONE]\n\n"
        assert await router.process.wait() == 0


async def test_a_worker_that_stands_still_is_replaced_and_keeps_nobody_from_ending() -> None:
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d), workers([], [d.url], hang_timeout_s=4.0) as router:
        still = router.pids[0]
        os.kill(still, signal.SIGSTOP)
        await eventually(lambda: len(router.now()) == 2 and still not in router.now())
        await eventually(lambda: _names_are(router, ["decode-0"]))
        os.kill(router.now()[0], signal.SIGSTOP)
        router.process.terminate()
        assert await router.process.wait() == 0


async def test_a_worker_whose_process_cannot_be_started_is_tried_again_and_harms_no_other(tmp_path: Path) -> None:
    d, log = Peer("decode", answer, facts=DECODE), tmp_path / "log"
    async with instances(d), workers([], [d.url], log=log) as router:
        parent = psutil.Process(router.process.pid)
        before = parent.rlimit(psutil.RLIMIT_NOFILE)
        parent.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))  # it gets no descriptor any more
        lost, other = router.pids
        os.kill(lost, signal.SIGKILL)
        await eventually(lambda: b"cannot start a process" in log.read_bytes())
        assert router.now() == [other]
        assert await complete(router) == 200
        parent.rlimit(psutil.RLIMIT_NOFILE, before)
        await eventually(lambda: len(router.now()) == 2)
        await eventually(lambda: _names_are(router, ["decode-0"]))


async def test_a_worker_that_is_started_later_goes_by_the_same_files_as_the_others(tmp_path: Path) -> None:
    d, tenants, (cert, key) = (
        Peer("decode", answer, facts=DECODE),
        tmp_path / "tenants.toml",
        Authority(tmp_path).issue(),
    )
    tenants.write_text("[someone]\nrequests_per_minute = 0.001\n")
    settings = {"tenants_file": tenants, "tenant_by": "user", "tls_cert": cert, "tls_key": key}
    async with instances(d), workers([], [d.url], **settings) as router:
        for path in (tenants, cert, key):
            path.write_text("[nonsense")
        for lost in router.pids:
            os.kill(lost, signal.SIGKILL)
        await eventually(lambda: router.num_listening() == 2 and not {*router.now()} & {*router.pids})
        statuses = [await complete(router, user="someone") for _ in range(20)]
        assert Counter(statuses) == {200: statuses.count(200), 429: 20 - statuses.count(200)}
        assert 1 <= statuses.count(200) <= 2  # one at each worker that it came to
        assert await complete(router, user="another") == 200


async def test_a_new_worker_follows_the_file_from_where_the_others_are(tmp_path: Path) -> None:
    path, (a, b, c) = tmp_path / "instances", [Peer("decode", answer, facts=DECODE) for _ in range(3)]
    async with instances(a, b, c):
        path.write_text(f"decode {a.url}\ndecode {b.url}\n")
        async with workers([], [], instances_file=path) as router:
            path.write_text(f"decode {b.url}\ndecode {c.url}\n")
            await eventually(lambda: _names_are(router, ["decode-1", "decode-2"]))
            os.kill(router.pids[0], signal.SIGKILL)
            await eventually(lambda: router.num_listening() == 2 and router.pids[0] not in router.now())
            await eventually(lambda: _names_are(router, ["decode-1", "decode-2"]))
            path.write_text(f"decode {c.url}\n")
            await eventually(lambda: _names_are(router, ["decode-2"]))
            b.calls.clear()
            assert {await complete(router) for _ in range(4)} == {200}
            assert not b.calls


async def test_keys_are_those_of_the_start_at_each_worker(tmp_path: Path) -> None:
    d, keys = Peer("decode", answer, facts=DECODE), tmp_path / "keys"
    keys.write_text("first\n")
    async with instances(d), workers([], [d.url], api_key_file=keys) as router:
        keys.write_text("second\n")
        for lost in router.pids:
            os.kill(lost, signal.SIGKILL)
        await eventually(lambda: router.num_listening() == 2 and not {*router.now()} & {*router.pids})
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer first"}) as session:
            async with session.post(router.url + "/v1/completions", json=BODY) as response:
                assert response.status == 200


async def test_workers_end_with_their_parent() -> None:
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d), workers([], [d.url]) as router:
        router.process.kill()
        await eventually(lambda: not any(map(is_running, router.pids)))


async def test_a_second_router_on_the_same_port_is_refused() -> None:
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d), workers([], [d.url]) as router:
        said = json.dumps([[], [d.url], {"workers": 2, "port": int(router.url.rpartition(":")[2])}])
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, said, stdout=PIPE, stderr=PIPE)
        _, told = await process.communicate()
        assert process.returncode != 0
        assert b"ConfigError: cannot listen on" in told
        assert await complete(router) == 200


@pytest.mark.parametrize("mistake", ["no decode instance", "tenants_file", "tls_cert"])
async def test_a_mistake_in_the_settings_ends_all_of_it(mistake: str, tmp_path: Path) -> None:
    file = {} if mistake == "no decode instance" else {mistake: str(tmp_path / "missing")}
    said = json.dumps([[], ["http://127.0.0.1:9"] if file else [], {"workers": 2, **file}])
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, said, stdout=PIPE, stderr=PIPE)
    _, told = await process.communicate()
    assert process.returncode != 0
    assert b"error: " in told
    assert not file or b"missing" in told


async def test_two_routers_before_the_same_instances_do_not_disturb_each_other() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with (
        instances(p, d),
        routing([p.url], [d.url]) as (one, one_url),
        routing([p.url], [d.url]) as (other, other_url),
        aiohttp.ClientSession() as session,
    ):

        async def ask(url: str) -> int:
            async with session.post(url + "/v1/completions", json=BODY) as response:
                await response.read()
                return response.status

        statuses = await asyncio.gather(*(ask(url) for url in (one_url, other_url) * 16))
        assert Counter(statuses) == {200: 32}
        for router in (one, other):
            assert not any(instance.is_in_use for instance in router.services.pools)
    named = [call.body["kv_transfer_params"]["transfer_id"] for call in p.calls if call.path == "/v1/completions"]
    assert len(set(named)) == len(named) == 32
