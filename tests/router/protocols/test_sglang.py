"""SGLang's form: what each leg is sent, as `sglang-router` 0.3.2 does, and what happens when one fails."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.instances.instance import SglangFacts, VllmFacts
from kvferry.router.protocols.choose import can_pair
from kvferry.router.protocols.sglang import sglang
from router.peers import Peer, answer, cut, failing, instances, routing
from router.request.test_hand_off import BODY, get, post

MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass
class SglangPeer(Peer):
    """A server that tells of itself as SGLang's do."""

    mode: str = "null"
    port: int = 0
    path: str = "/server_info"
    rooms: list[int] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    async def _server_info(self, request: Request) -> Response:
        if request.url.path != self.path:
            return JSONResponse({}, status_code=404)
        about = {"disaggregation_mode": self.mode, "served_model_name": "m", "version": "0.5.6", "more": [1]}
        return JSONResponse(about | self.about | ({"disaggregation_bootstrap_port": self.port} if self.port else {}))


def pair(p: Any = answer, d: Any = answer, **about: Any) -> tuple[SglangPeer, SglangPeer]:
    return SglangPeer("prefill", p, mode="prefill", **about), SglangPeer("decode", d, mode="decode")


@pytest.mark.parametrize("protocol", ["auto", "sglang"])
@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_both_get_the_request_and_where_they_meet(protocol: str, path: str) -> None:
    p, d = pair(port=9001, path=path)
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "seed": 3}
    async with instances(p, d), routing([p.url], [d.url], protocol=protocol) as (_, url):
        assert (await post(url, body, **{"X-Request-Id": "abc"}))[0] == 200
        metrics = (await get(url, "/metrics"))[1]
    (to_p,), (to_d,) = p.calls, d.calls
    meeting = {name: to_d.body[name] for name in MEETING}
    assert to_d.body == {**body, **meeting}
    same = {name: value for name, value in body.items() if name != "stream_options"}
    assert to_p.body == {**same, "stream": False, **meeting}
    assert (meeting["bootstrap_host"], meeting["bootstrap_port"]) == ("127.0.0.1", 9001)
    assert 0 <= meeting["bootstrap_room"] < 2**63
    assert to_p.headers["x-request-id"] == to_d.headers["x-request-id"] == "abc"
    assert 'hand_offs_total{kind="concurrent",reason=""} 1.0' in metrics


async def test_a_client_cannot_say_where_they_meet() -> None:
    p, d = pair(port=9001)
    address = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7, "bootstrap_pair_key": "k"}
    ranks = {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1, "data_parallel_rank": 1}
    headers = {f"X-Override-{name.replace('_', '-')}": str(value) for name, value in (address | ranks).items()}
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        assert (await post(url, {**BODY, **address, **ranks}, **headers))[0] == 200
    for call in (*p.calls, *d.calls):
        assert {name for name in call.body if name in address | ranks} == set(MEETING)
        assert call.body["bootstrap_host"] == "127.0.0.1"
        assert not [name for name in call.headers if name.startswith("x-override-")]


@pytest.mark.parametrize(
    ("events", "address"),
    [
        ({"endpoint_host": "127.0.0.1", "replay_endpoint_port_base": 5600}, ("127.0.0.1:5557", "127.0.0.1:5600")),
        ({"endpoint_host": "*"}, ("127.0.0.1:5557", None)),
        ({"endpoint_host": "::1"}, ("[::1]:5557", None)),
        ({"endpoint_host": "not a host"}, None),
        ({"endpoint_host": "*", "dp_size": 2}, None),
    ],
)
async def test_where_a_server_publishes_its_kv_events(events: dict[str, Any], address: Any) -> None:
    p, d = pair(port=9001)
    p.about = {"kv_events": {"endpoint_port_base": 5557, "dp_size": 1, **events}, "max_total_num_tokens": 640}
    async with instances(p, d), routing([p.url], [d.url]) as (router, url):
        assert (await post(url))[0] == 200
        instance = router.services.pools.find(p.url)
    assert instance is not None
    assert isinstance(instance.facts, SglangFacts)
    assert instance.facts.num_kv_tokens == 640
    found = instance.facts.kv_events
    expected = address and tuple(one and f"tcp://{one}" for one in address)
    assert (found and (found.endpoint, found.replay_endpoint)) == expected


async def test_the_port_is_what_the_flag_says_where_the_server_does_not() -> None:
    p, d = pair()
    async with instances(p, d), routing([p.url], [d.url], bootstrap_port=(9007,)) as (_, url):
        assert (await post(url))[0] == 200
    assert d.calls[0].body["bootstrap_port"] == 9007


async def until_gone(peer: Peer, request: Request, body: Any) -> Response:
    """P: waits for D to come to the room."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    peer.disconnected.set()
    return Response()


async def test_when_decode_fails_both_legs_are_sent_anew_with_another_room() -> None:
    p, bad = pair(p=until_gone, d=failing(500), port=9001)
    good = SglangPeer("decode", answer, mode="decode")
    async with instances(p, bad, good), routing([p.url], [bad.url, good.url]) as (_, url):
        assert (await post(url))[0] == 200
        await p.disconnected.wait()
        assert p.released.empty()
    rooms = [one.body["bootstrap_room"] for one in (*bad.calls, *good.calls)]
    assert len(set(rooms)) == len(rooms) == 2
    assert [one.body["bootstrap_room"] for one in p.calls] == rooms


async def test_when_prefill_fails_decode_does_not_wait() -> None:
    bad, d = pair(p=failing(500), d=until_gone_at_first(), port=9001)
    good = SglangPeer("prefill", answer, mode="prefill", port=9002)
    async with instances(bad, good, d), routing([bad.url, good.url], [d.url]) as (_, url):
        assert (await post(url))[0] == 200
        await d.disconnected.wait()
    assert [one.body["bootstrap_port"] for one in d.calls] == [9001, 9002]


def until_gone_at_first() -> Any:
    async def answering(peer: Peer, request: Request, body: Any) -> Response:
        return await (until_gone if len(peer.calls) == 1 else answer)(peer, request, body)

    return answering


async def test_leaving_ends_both() -> None:
    p, d = pair(p=until_gone, d=until_gone, port=9001)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        task = asyncio.create_task(post(url))
        await p.called.wait()
        await d.called.wait()
        task.cancel()
        await p.disconnected.wait()
        await d.disconnected.wait()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_has_lost_a_request_is_still_known_as_what_it_is(role: str) -> None:
    """Nobody looks at its health before the next request comes."""
    p, d = pair(port=9001)
    async with instances(p, d), routing([p.url], [d.url]) as (router, url):
        peer = p if role == "prefill" else d
        peer.answering = cut
        await post(url)
        found = router.services.pools.find(peer.url)
        assert found is not None
        assert found.process.is_stale
        peer.answering = answer
        for one in (p, d):
            one.calls.clear()
        assert (await post(url))[0] == 200
    assert [set(MEETING) <= one.body.keys() for one in (*p.calls, *d.calls)] == [True, True]
    assert "kv_transfer_params" not in p.calls[0].body


async def test_servers_of_one_phase_get_no_whole_request() -> None:
    """They would answer 400, as the request has no room."""
    p, d = pair(port=9001)
    async with instances(p, d), routing([p.url], [d.url], disaggregate_from="1000000") as (_, url):
        assert (await post(url))[0] == 200
        for field, value in (("n", 2), ("prompt_logprobs", 1), ("use_beam_search", True)):
            status, content, _ = await post(url, {**BODY, field: value})
            assert (status, "cannot be handed off between SGLang's servers" in content["error"]["message"]) == (
                400,
                True,
            )
    assert [set(MEETING) <= one.body.keys() for one in (*p.calls, *d.calls)] == [True, True]


async def test_without_prefill_servers_of_one_phase_cannot_answer() -> None:
    _, d = pair()
    async with instances(d), routing([], [d.url]) as (_, url):
        status, content, _ = await post(url)
        assert (status, "no prefill instance" in content["error"]["message"]) == (503, True)
    assert d.calls == []


async def test_a_server_that_is_not_known_yet_is_not_expected_to_answer_alone() -> None:
    """A server that is starting, or changes its role, beside one of one phase."""
    _, d = pair()
    async with instances(d), routing([], [d.url, "http://127.0.0.1:1"]) as (_, url):
        status, content, _ = await post(url)
        assert (status, "no prefill instance" in content["error"]["message"]) == (503, True)
    assert d.calls == []


async def test_servers_of_both_phases_get_whole_requests() -> None:
    d = SglangPeer("decode", answer)
    async with instances(d), routing([], [d.url]) as (_, url):
        assert (await post(url))[0] == 200
    assert len(d.calls) == 1


def test_rooms_and_pairs() -> None:
    form = sglang("f" * 32, "host", 1)
    assert form.early == {"bootstrap_host": "host", "bootstrap_port": 1, "bootstrap_room": 2**62 - 1}
    assert can_pair(SglangFacts(), SglangFacts())
    assert not can_pair(SglangFacts(), VllmFacts())
    assert not can_pair(InstanceFacts(), SglangFacts())
    assert not can_pair(SglangFacts(transfer_backend="nixl"), SglangFacts(transfer_backend="mooncake"))
    assert not can_pair(SglangFacts(model_names=["a"]), SglangFacts(model_names=["b"]))
    assert can_pair(SglangFacts(cache_dtype="fp8_e5m2"), SglangFacts(mode="decode"))
