"""The picker behind a real Envoy: answers come from where it said, and it says what a router would choose."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.cli.main import main
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.limits import HttpLimits
from kvferry.router.app import Router, build_router
from kvferry.router.config import RouterConfig
from kvferry.router.picker.config import PickerConfig
from router.peers import CONCURRENT, DECODE, Peer, answer, answer_when_told, failing, instances, ticket
from support.certificates import Authority
from support.envoy import Envoy, envoy, require_envoy
from support.ports import free_port
from support.processes import KvferryProcess, begun
from support.waiting import eventually

grpc = pytest.importorskip("grpc", reason="needs kvferry[picker]")
health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
ext_proc = pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2")
picker_server = pytest.importorskip("kvferry.router.picker.server")
require_envoy()

PICKER_PORT, LIMITS = free_port(), HttpLimits()
BODY = {"model": "m", "prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    with envoy(tmp_path_factory.mktemp("envoy"), PICKER_PORT) as running:
        yield running


@asynccontextmanager
async def picking(
    decode: list[Peer],
    prefill: Sequence[Peer] = (),
    *,
    picker: PickerConfig | None = None,
    limits: HttpLimits = LIMITS,
    **settings: Any,
) -> AsyncIterator[Router]:
    """A picker in this process, before these peers; in the end nothing is left of any request."""
    settings.setdefault("policy", "round_robin")
    settings.setdefault("health_interval_s", 3600)
    async with instances(*prefill, *decode):
        config = RouterConfig(
            prefill_url=tuple(one.url for one in prefill), decode_url=tuple(one.url for one in decode), **settings
        )
        http = HttpConfig(shutdown_grace_s=1, limits=limits)
        router = build_router(config, http)
        server, _ = picker_server.grpc_server(router, picker or PickerConfig(grpc_port=PICKER_PORT), http)
        server.add_insecure_port(f"127.0.0.1:{PICKER_PORT}")
        async with router.running():
            await router.health.probe_all()
            await server.start()
            try:
                yield router
                await nothing_left(router)
            finally:
                await server.stop(0)


async def nothing_left(router: Router) -> None:
    """Of requests that are over, once Envoy has said so."""
    async with asyncio.timeout(10):
        await eventually(
            lambda: (
                not (
                    router.turns.num_requests
                    or router.admission.num_bytes
                    or any(one.load.num_legs for one in router.services.pools)
                )
            )
        )
    router.admission.check()
    router.turns.check()
    for one in router.services.pools:
        assert one.load.num_prefills == one.load.num_decodes == 0
        assert abs(one.load.prefill_tokens) < 1e-6


def decoders(number: int, answering: Any = answer) -> list[Peer]:
    return [Peer("decode", answering, facts={**DECODE, "engine_id": f"d{one}"}) for one in range(number)]


def prefiller() -> Peer:
    return Peer("prefill", ticket, facts=CONCURRENT)


def address(peer: Peer) -> str:
    return peer.url.removeprefix("http://")


async def post(url: str, body: Any = BODY, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(url + path, content=content, headers={"content-type": "application/json", **headers})


async def test_answers_come_from_where_the_policy_says(gateway: Envoy) -> None:
    peers = decoders(3)
    async with picking(peers) as router:
        for _ in range(6):
            assert (await post(gateway.url)).json()["choices"][0]["text"] == "done"
        assert [len(one.calls) for one in peers] == [2, 2, 2]
        assert {call.headers["x-gateway-destination-endpoint"] for call in peers[1].calls} == {address(peers[1])}
        decision = json.loads(router.services.chooser.decisions.encode(1))["decisions"][0]
        assert decision["decode"] in {"decode-0", "decode-1", "decode-2"}


async def test_the_prompt_decides(gateway: Envoy) -> None:
    """A policy that looks at prompts: what begins alike goes to one instance."""
    peers = decoders(3)
    async with picking(peers, policy="prefix"):
        for number in range(4):
            for topic in ("whales ", "trains ", "comets "):
                await post(gateway.url, {**BODY, "prompt": topic * 400 + str(number)})
    topics = [{call.body["prompt"].split(" ")[0] for call in one.calls} for one in peers]
    assert all(len(one) == 1 for one in topics)
    assert set().union(*topics) == {"whales", "trains", "comets"}


async def test_prefill_is_named_as_llm_d_does(gateway: Envoy) -> None:
    d, p = decoders(1), prefiller()
    async with picking(d, [p], disaggregate_from="3"):
        await post(gateway.url)
        await post(gateway.url, {**BODY, "prompt": "a"})
    long, short = d[0].calls
    assert long.headers["x-prefiller-host-port"] == address(p)
    assert "x-prefiller-host-port" not in short.headers


async def test_what_only_the_picker_says_is_not_taken_from_clients(gateway: Envoy) -> None:
    (peer,) = peers = decoders(1)
    bad = {
        "x-prefiller-host-port": "10.0.0.9:1",
        "x-encoder-hosts-ports": "10.0.0.9:1",
        "x-data-parallel-host-port": "10.0.0.9:1",
        "x-gateway-destination-endpoint": "10.0.0.9:1",
        "x-kvferry-progress": "1",
    }
    async with picking(peers):
        body = {**BODY, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9"}}
        assert (await post(gateway.url, body, **bad)).status_code == 200
        (call,) = peer.calls
        assert call.body == BODY
        assert call.headers["x-gateway-destination-endpoint"] == address(peer)
        assert not {
            "x-prefiller-host-port",
            "x-encoder-hosts-ports",
            "x-data-parallel-host-port",
            "x-kvferry-progress",
        } & {*call.headers}


@pytest.mark.parametrize("num_bytes", [100_000, 5_000_000])
async def test_large_bodies_arrive_as_they_were_sent(gateway: Envoy, num_bytes: int) -> None:
    (peer,) = peers = decoders(1)
    prompt = "".join(chr(ord("a") + number % 23) for number in range(num_bytes))
    async with picking(peers):
        assert (await post(gateway.url, {**BODY, "prompt": prompt})).status_code == 200
    assert peer.calls[0].body["prompt"] == prompt


async def test_a_body_in_chunks(gateway: Envoy) -> None:
    (peer,) = peers = decoders(1)
    text = json.dumps(BODY).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for one in text:
            yield bytes([one])

    async with picking(peers), httpx.AsyncClient() as client:
        answered = await client.post(
            f"{gateway.url}/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
    assert (answered.status_code, peer.calls[0].body) == (200, BODY)


async def test_a_stream_is_counted_until_its_end(gateway: Envoy) -> None:
    (peer,) = peers = decoders(1, answer_when_told)
    async with picking(peers) as router, httpx.AsyncClient(timeout=20) as client:
        (instance,) = router.services.pools.decode.instances
        async with client.stream("POST", f"{gateway.url}/v1/completions", json={**BODY, "stream": True}) as answered:
            texts = answered.aiter_raw()
            assert b"one" in await anext(texts)
            assert (instance.load.num_legs, instance.load.num_decodes, instance.load.num_prefills) == (1, 1, 0)
            peer.go.set()
            assert b"[DONE]" in b"".join([one async for one in texts])


async def test_a_client_that_leaves_is_no_longer_counted(gateway: Envoy) -> None:
    (peer,) = peers = decoders(1, answer_when_told)
    async with picking(peers), httpx.AsyncClient(timeout=20) as client:
        async with client.stream("POST", f"{gateway.url}/v1/completions", json={**BODY, "stream": True}) as answered:
            await anext(answered.aiter_raw())
        async with asyncio.timeout(10):
            await peer.disconnected.wait()


async def test_no_instance_is_503_and_full_ones_are_429(gateway: Envoy) -> None:
    peers = decoders(2, failing(429, **{"Retry-After": "30"}))
    believing = PickerConfig(grpc_port=PICKER_PORT, unproven_pause_s=60)
    async with picking(peers, picker=believing) as router:
        for _ in range(2):
            assert (await post(gateway.url)).json()["error"]["from"] == "decode"
        full = await post(gateway.url)
        assert (full.status_code, full.headers["retry-after"]) == (429, "30")
        assert [len(one.calls) for one in peers] == [1, 1]
        for one in router.services.pools.decode.instances:
            one.mark_down("of a test")
        gone = await post(gateway.url)
        assert (gone.status_code, gone.json()["error"]["type"]) == (503, "unavailable_error")


async def test_more_than_may_run_at_once_are_429(gateway: Envoy) -> None:
    (peer,) = peers = decoders(1, answer_when_told)
    async with picking(peers, max_in_flight=1, max_waiting=0), asyncio.TaskGroup() as group:
        first = group.create_task(post(gateway.url, {**BODY, "stream": True}))
        await peer.called.wait()
        assert (await post(gateway.url)).status_code == 429
        peer.go.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (b"{", "/v1/completions", 400),
        (b'{"model":"m","model":"n"}', "/v1/completions", 400),
        (b"[]", "/v1/completions", 400),
        (b"\xff\xfe", "/v1/chat/completions", 400),
        (b"{}", "/sleep", 404),
        (b"{}", "/kvferry/release", 404),
        (b'{"prompt":"' + b"a" * 2_000_000 + b'"}', "/v1/completions", 413),
    ],
)
async def test_what_is_no_request_gets_no_instance(gateway: Envoy, body: bytes, path: str, status: int) -> None:
    (peer,) = peers = decoders(1)
    async with picking(peers, max_body="1MiB"):
        refused = await post(gateway.url, body, path)
        assert (refused.status_code, "error" in refused.json()) == (status, True)
        assert peer.calls == peer.others == []


async def test_requests_without_a_prompt(gateway: Envoy) -> None:
    peers = decoders(2)
    async with picking(peers), httpx.AsyncClient() as client:
        for _ in range(2):
            assert (await client.get(f"{gateway.url}/v1/models")).json()["path"] == "/v1/models"
        assert (await client.post(f"{gateway.url}/v1/embeddings", json={"input": "x"})).status_code == 200
    assert {len(one.others) for one in peers} == {1, 2}


async def test_an_instance_that_went_down_is_answered_for_by_the_next(tmp_path: Path) -> None:
    peers = decoders(2)
    async with picking(peers, picker=PickerConfig(grpc_port=PICKER_PORT, fallbacks=1)) as router:
        with envoy(tmp_path, PICKER_PORT, hosts=[address(one) for one in peers]) as gateway:
            await peers[0].close()
            for _ in range(4):
                assert (await post(gateway.url)).status_code == 200
            assert len(peers[1].calls) == 4
            for one in router.services.pools.decode.instances:
                if one.url == peers[0].url:
                    one.mark_down("of a test")
            before = gateway.counted("cluster.instances.upstream_rq_retry")
            assert (await post(gateway.url)).status_code == 200
            assert gateway.counted("cluster.instances.upstream_rq_retry") == before


async def test_only_the_endpoints_that_the_gateway_names(tmp_path: Path) -> None:
    peers = decoders(3)
    async with picking(peers) as router:
        subset = [address(peers[2])]
        with envoy(tmp_path, PICKER_PORT, subset=subset, response_body="FULL_DUPLEX_STREAMED") as gateway:
            for _ in range(3):
                assert (await post(gateway.url, {**BODY, "stream": True})).status_code == 200
            assert [len(one.calls) for one in peers] == [0, 0, 3]
            next(one for one in router.services.pools if one.url == peers[2].url).mark_down("of a test")
            assert (await post(gateway.url)).status_code == 503


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ({"request_body": {"body": b"{}", "end_of_stream": True}}, 400),
        ({"request_headers": {}, "protocol_config": {"request_body_mode": "BUFFERED"}}, 500),
        ({"request_headers": {"end_of_stream": True}}, 404),
    ],
)
async def test_a_gateway_that_is_set_up_wrongly_is_told_so(first: dict[str, Any], status: int) -> None:
    async with picking(decoders(1)), grpc.aio.insecure_channel(f"127.0.0.1:{PICKER_PORT}") as channel:
        stream = asking(channel)
        await stream.write(ext_proc.ProcessingRequest(**first))
        assert (await stream.read()).immediate_response.status.code == status


async def test_what_is_no_message_is_refused_in_words(caplog: pytest.LogCaptureFixture) -> None:
    async with picking(decoders(1)), grpc.aio.insecure_channel(f"127.0.0.1:{PICKER_PORT}") as channel:
        stream = asking(channel, bytes)
        await stream.write(b"\xff no protobuf")
        assert (await stream.read()).immediate_response.status.code == 400
    assert "Traceback" not in caplog.text


async def refusal(stream: Any) -> int | None:
    """The status with which a message that is out of turn is refused; None: the connection is."""
    try:
        await stream.write(ext_proc.ProcessingRequest(request_body={"body": b"{}"}))
        return int((await stream.read()).immediate_response.status.code)
    except grpc.aio.AioRpcError:
        return None


async def test_only_gateways_with_a_certificate_are_answered(tmp_path: Path) -> None:
    """Without one, anybody could say that an instance is full."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    cert, key = ours.issue()
    http = HttpConfig(port=0, tls_cert=cert, tls_key=key, tls_ca=ours.ca, tls_verify_clients=True)
    router = build_router(RouterConfig(decode_url=("http://127.0.0.1:9",)), http)
    server, _ = picker_server.grpc_server(router, PickerConfig(grpc_port=0), http)
    port = picker_server.bind(server, PickerConfig(grpc_port=0), http)
    await server.start()
    try:
        for authority, code in ((None, None), (theirs, None), (ours, 400)):
            files = () if authority is None else tuple(one.read_bytes() for one in reversed(authority.issue("gateway")))
            credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes(), *files)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                assert await refusal(asking(channel)) == code
    finally:
        await server.stop(0)


HEAD = [(":method", "GET"), (":path", "/v1/models")]
FULL = [(":status", "429"), ("retry-after", "3600")]


def headers(*pairs: tuple[str, str]) -> Any:
    rows = [{"key": name, "raw_value": value.encode()} for name, value in pairs]
    return {"headers": {"headers": rows}, "end_of_stream": True}


async def say_that_it_is_full(channel: Any) -> None:
    """As a gateway would of the instance that it was given for a request."""
    stream = asking(channel)
    await stream.write(ext_proc.ProcessingRequest(request_headers=headers(*HEAD)))
    await stream.read()
    await stream.write(ext_proc.ProcessingRequest(response_headers=headers(*FULL)))
    await stream.read()
    await stream.done_writing()


async def test_who_shows_no_certificate_keeps_requests_from_an_instance_for_a_second_at_most() -> None:
    async with picking(decoders(1)) as router:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{PICKER_PORT}") as channel:
            await say_that_it_is_full(channel)
        (instance,) = router.services.pools.decode.instances
        assert 0.0 < instance.paused_until <= router.services.clock.monotonic() + 1.0


async def test_a_gateway_with_a_certificate_is_believed(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    cert, key = ours.issue()
    http = HttpConfig(port=0, tls_cert=cert, tls_key=key, tls_ca=ours.ca, tls_verify_clients=True)
    router = build_router(RouterConfig(decode_url=("http://127.0.0.1:9",)), http)
    server, _ = picker_server.grpc_server(router, PickerConfig(grpc_port=0), http)
    port = picker_server.bind(server, PickerConfig(grpc_port=0), http)
    await server.start()
    try:
        credentials = grpc.ssl_channel_credentials(
            ours.ca.read_bytes(), *(file.read_bytes() for file in reversed(ours.issue("gateway")))
        )
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            await say_that_it_is_full(channel)
    finally:
        await server.stop(0)
    (instance,) = router.services.pools.decode.instances
    assert instance.paused_until > router.services.clock.monotonic() + 30.0


async def test_a_body_that_does_not_come_is_given_up() -> None:
    head = {"headers": {"headers": [{"key": ":method", "value": "POST"}, {"key": ":path", "value": "/v1/completions"}]}}
    limits = HttpLimits(http_body_gap_s=0.05)
    async with picking(decoders(1), limits=limits), grpc.aio.insecure_channel(f"127.0.0.1:{PICKER_PORT}") as channel:
        stream = asking(channel)
        await stream.write(ext_proc.ProcessingRequest(request_headers=head))
        assert (await stream.read()).immediate_response.status.code == 408


def asking(channel: Any, serializer: Any = ext_proc.ProcessingRequest.SerializeToString) -> Any:
    """A stream to the picker, as a gateway's."""
    method = f"/{picker_server.EXTERNAL_PROCESSOR}/Process"
    return channel.stream_stream(
        method,
        request_serializer=serializer,
        response_deserializer=ext_proc.ProcessingResponse.FromString,
    )()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--decode-url", "http://decode:8000"], "names instances by address"),
        (["--decode-url", "http://127.0.0.1:9", "--workers", "2"], "start several pickers"),
        (["--decode-url", "http://127.0.0.1:9", "--prefill-header", "a b"], "must be the name of a header"),
        ([], "at least one decode instance"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["picker", *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.processes
async def test_a_picker_that_hangs_or_dies_ends_no_more_than_its_requests(tmp_path: Path) -> None:
    """And what a gateway asks next is answered as soon as one is there again."""
    (peer,) = peers = decoders(1)
    port = free_port()
    async with instances(*peers):
        with ExitStack() as running, envoy(tmp_path, port) as gateway:
            picker = await started(running, tmp_path / "first.log", port, peer.url)
            assert (await post(gateway.url)).status_code == 200
            os.kill(picker.pid, signal.SIGSTOP)
            assert (await post(gateway.url)).status_code in (500, 504)
            os.kill(picker.pid, signal.SIGCONT)
            assert (await post(gateway.url)).status_code == 200
            picker.kill()
            assert (await post(gateway.url)).status_code >= 500
            picker = await started(running, tmp_path / "second.log", port, peer.url)
            assert (await post(gateway.url)).status_code == 200
            assert await healths(port) == [health_pb2.HealthCheckResponse.SERVING] * 3
            async with httpx.AsyncClient() as client:
                assert "kvferry_router_requests" in (await client.get(f"{picker.url}/metrics")).text


async def started(running: ExitStack, log: Path, port: int, url: str) -> KvferryProcess:
    """A picker as a process."""
    command = ("picker", "--grpc-port", str(port), "--decode-url", url)
    ready = running.enter_context(begun(*command, log=log, ends_cleanly=False))
    return await asyncio.to_thread(ready)


async def healths(port: int) -> list[int]:
    """What it says to gRPC's health checks."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("liveness", "readiness", picker_server.EXTERNAL_PROCESSOR)
        return [(await stub.Check(health_pb2.HealthCheckRequest(service=one))).status for one in names]
