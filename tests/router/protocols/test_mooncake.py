"""vLLM servers with connectors of their own: what each leg is sent, and that nothing stays behind at P."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.config import RouterConfig
from kvferry.router.instances.facts import read_bootstrap
from kvferry.router.instances.instance import Bootstrap, NotProbed, UnknownFacts, VllmFacts
from kvferry.router.protocols.choose import can_pair, choose_form
from kvferry.router.protocols.mooncake import mooncake
from router.peers import CONCURRENT, DECODE, Peer, answer, failing, instances, routing, ticket, unused_address
from router.request.test_hand_off import BODY, get, leave_after, post
from router.vllm_peers import VERSION, KvferryPair, MooncakePrefill, NixlPair
from support.waiting import eventually

PROTOCOLS = ["auto", "nixl"]
CHAT = "/v1/chat/completions"


# NIXL's form.


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_p_then_d_with_the_ticket_and_the_clients_own_body(protocol: str) -> None:
    pair = NixlPair()
    body = {**BODY, "min_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 2}
    async with (
        instances(pair.prefill, pair.decode),
        routing([pair.prefill.url], [pair.decode.url], protocol=protocol) as (_, url),
    ):
        status, _, headers = await post(url, body, **{"X-Request-Id": "abc"})
        metrics = (await get(url, "/metrics"))[1]
    assert status == 200
    assert headers["X-Request-Id"] == "abc"
    assert not pair.held
    (asked,), (decoded,) = pair.prefill.calls, pair.decode.calls
    names = {call.body["kv_transfer_params"]["transfer_id"] for call in (asked, decoded)}  # P's ticket has none
    assert len(names) == 1
    assert (asked.body["min_tokens"], asked.headers["x-request-id"]) == (1, "abc")
    assert decoded.headers["x-request-id"] == "abc"
    assert "seed" not in asked.body
    assert {name: value for name, value in decoded.body.items() if name != "kv_transfer_params"} == body
    assert 'hand_offs_total{kind="sequential",reason=""} 1.0' in metrics


async def test_chat_limits_are_one_token() -> None:
    pair = NixlPair()
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 64, "seed": 3}
    async with instances(pair.prefill, pair.decode), routing([pair.prefill.url], [pair.decode.url]) as (_, url):
        assert (await post(url, body, CHAT))[0] == 200
    assert (pair.prefill.calls[0].body["max_completion_tokens"], pair.prefill.calls[0].body["max_tokens"]) == (1, 1)
    assert (pair.prefill.calls[0].body["seed"], pair.decode.calls[0].body["seed"]) == (3, 3)
    assert pair.decode.calls[0].body["max_completion_tokens"] == 64


@pytest.mark.parametrize("more", [{"n": 3}, {"best_of": 2}, {"n": "many"}])
async def test_several_choices_are_not_split(more: dict[str, Any]) -> None:
    """Each choice would fetch P's blocks anew, when they are another's."""
    pair = NixlPair()
    async with instances(pair.prefill, pair.decode), routing([pair.prefill.url], [pair.decode.url]) as (_, url):
        assert (await post(url, {**BODY, **more}))[0] == 200
    assert pair.prefill.calls == []
    assert pair.decode.calls[0].body == {**BODY, **more}


async def test_a_client_that_leaves_during_prefill_is_noticed_by_p() -> None:
    pair = NixlPair(waits=True)
    async with instances(pair.prefill, pair.decode), routing([pair.prefill.url], [pair.decode.url]) as (_, url):
        await leave_after(url, BODY, pair.prefill.called.wait())
        await pair.prefill.disconnected.wait()
    assert pair.decode.calls == []


async def test_a_ticket_that_no_decode_instance_got_is_given_up_through_another() -> None:
    """The one D that was tried is gone; vLLM's P is told by a D that refuses a request with the ticket."""
    pair = NixlPair()
    async with (
        unused_address() as nowhere,
        instances(pair.prefill, pair.decode),
        routing([pair.prefill.url], [nowhere, pair.decode.url], protocol="nixl", retries=0) as (router, url),
    ):
        router.services.pools.decode.instances[0].mark_healthy()  # as far as the router knows
        assert (await post(url, Authorization="Bearer key"))[0] == 503
        assert await pair.given_up.get()
        assert not pair.held
    (told,) = pair.decode.calls
    assert told.headers["authorization"] == "Bearer key"


async def test_a_ticket_that_d_has_seen_is_left_to_d() -> None:
    pair = NixlPair()
    d = Peer("decode", failing(500), vllm=VERSION)
    async with (
        instances(pair.prefill, d, pair.decode),
        routing([pair.prefill.url], [d.url, pair.decode.url], retries=0) as (_, url),
    ):
        assert (await post(url))[0] == 500
    assert pair.decode.calls == []
    assert pair.given_up.empty()


async def test_another_d_gets_the_same_ticket() -> None:
    pair = NixlPair()
    d = Peer("decode", failing(503), vllm=VERSION)
    async with (
        instances(pair.prefill, d, pair.decode),
        routing([pair.prefill.url], [d.url, pair.decode.url]) as (_, url),
    ):
        assert (await post(url))[0] == 200
    assert pair.decode.calls[0].body["kv_transfer_params"] == d.calls[0].body["kv_transfer_params"]
    assert len(pair.prefill.calls) == 1


async def test_kvferrys_engine_and_vllm_are_never_paired() -> None:
    pair, d = NixlPair(), Peer("decode", answer, facts=DECODE)
    async with instances(pair.prefill, d), routing([pair.prefill.url], [d.url]) as (_, url):
        assert (await post(url))[0] == 200
    assert pair.prefill.calls == []
    assert d.calls[0].body == BODY


async def test_each_prefill_finds_its_own_kind() -> None:
    pair = NixlPair()
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with (
        instances(pair.prefill, pair.decode, p, d),
        routing([pair.prefill.url, p.url], [d.url, pair.decode.url], hand_off="sequential") as (_, url),
    ):
        for _ in range(4):
            assert (await post(url))[0] == 200
    assert [len(one.calls) for one in (pair.prefill, pair.decode, p, d)] == [2, 2, 2, 2]


# kvferry's P2P connector in vLLM.


async def test_d_asks_p_itself_once_a_ticket_has_told_where() -> None:
    pair = KvferryPair(["engine-p"])
    pair.prefill.go.set()
    async with (
        instances(pair.prefill, pair.decode),
        routing([pair.prefill.url], [pair.decode.url], hand_off="concurrent") as (_, url),
    ):
        assert (await post(url))[0] == 200
        pair.prefill.go.clear()
        pair.decode.called.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(post(url, {**BODY, "stream": True}))
            await pair.decode.called.wait()  # P has not answered
            pair.prefill.go.set()
        metrics = (await get(url, "/metrics"))[1]
    assert asked.result()[0] == 200
    assert pair.early == ["engine-p"]
    assert len(pair.decode.calls) == 2
    assert "seed" not in pair.decode.calls[1].body  # D draws the first token itself
    assert pair.decode.calls[1].body["kv_transfer_params"]["remote_prefill_cached_tokens"] == 0
    assert 'hand_offs_total{kind="sequential",reason=""} 1.0' in metrics
    assert 'hand_offs_total{kind="concurrent",reason=""} 1.0' in metrics


async def test_d_is_called_again_when_another_of_ps_engines_has_answered() -> None:
    pair = KvferryPair(["engine-0", "engine-1"])
    pair.prefill.go.set()
    async with (
        instances(pair.prefill, pair.decode),
        routing([pair.prefill.url], [pair.decode.url], hand_off="concurrent") as (_, url),
    ):
        assert [(await post(url))[0] for _ in range(4)] == [200] * 4
    assert pair.early == ["engine-0"]  # from then on nobody knows which engine will answer
    assert len(pair.decode.calls) == 5


@pytest.mark.parametrize("hand_off", ["auto", "sequential", "concurrent"])
async def test_a_restarted_server_tells_anew(hand_off: Literal["auto", "sequential", "concurrent"]) -> None:
    pair = KvferryPair(["engine-p"])
    pair.prefill.go.set()
    settings: dict[str, Any] = {"hand_off": hand_off}
    async with (
        instances(pair.prefill, pair.decode),
        routing([pair.prefill.url], [pair.decode.url], **settings) as (router, url),
    ):
        assert (await post(url))[0] == 200
        pair.engine_ids = ["engine-after-restart"]
        router.services.pools.prefill.instances[0].invalidate()
        await router.health.probe(router.services.pools)
        assert [(await post(url))[0] for _ in range(2)] == [200] * 2
    assert pair.early == (["engine-after-restart"] if hand_off == "concurrent" else [])


# Mooncake's form.


@pytest.mark.parametrize("protocol", ["auto", "mooncake"])
@pytest.mark.parametrize("hand_off", ["auto", "sequential"])
async def test_p_and_d_share_a_transfer_id(protocol: str, hand_off: str) -> None:
    """At once, P does not begin before D asks; one after the other, D asks for what P already has."""
    p = MooncakePrefill(["engine-0", "engine-1"], at_once=hand_off == "auto")
    d = Peer("decode", p.decode, vllm=VERSION)
    async with p.bootstrap(), instances(p.peer, d):
        ports = (p.bootstrap_port,)
        settings: dict[str, Any] = {"protocol": protocol, "bootstrap_port": ports, "hand_off": hand_off}
        async with routing([p.peer.url], [d.url], **settings) as (_, url):
            for _ in range(8):
                body = {**BODY, "stop_token_ids": [5], "ignore_eos": False}
                assert (await post(url, body))[0] == 200
    for asked, decoded in zip(p.peer.calls, d.calls, strict=True):
        params = decoded.body["kv_transfer_params"]
        assert params["transfer_id"] == asked.body["kv_transfer_params"]["transfer_id"]
        assert params["remote_bootstrap_addr"] == p.bootstrap_url
        assert decoded.body["stop_token_ids"] == [5]
        assert decoded.body["ignore_eos"] is False
    assert len({call.body["kv_transfer_params"]["transfer_id"] for call in d.calls}) == 8


async def test_without_a_bootstrap_server_mooncake_does_not_hand_off() -> None:
    p, d = Peer("prefill", ticket, vllm=VERSION), Peer("decode", answer, vllm=VERSION)
    async with (
        unused_address() as nowhere,
        instances(p, d),
        routing([p.url], [d.url], protocol="mooncake", bootstrap_port=(int(nowhere.rsplit(":", 1)[1]),)) as (_, url),
    ):
        assert (await post(url))[0] == 200
        assert 'reason="no_bootstrap"' in (await get(url, "/metrics"))[1]
    assert p.calls == []
    assert d.calls[0].body == BODY


async def test_a_p_that_was_restarted_is_asked_for_its_new_engine() -> None:
    p = MooncakePrefill(["engine-0"], at_once=False)
    d = Peer("decode", p.decode, vllm=VERSION)
    async with p.bootstrap(), instances(p.peer, d):
        settings: dict[str, Any] = {"bootstrap_port": (p.bootstrap_port,), "hand_off": "sequential"}
        async with routing([p.peer.url], [d.url], **settings) as (router, url):
            p.engine_ids[0] = "engine-after-restart"
            assert (await post(url))[0] == 500
            await router.health.probe(router.services.pools)
            assert (await post(url))[0] == 200


# Choosing.


def test_a_data_parallel_engine_in_turn_and_its_header() -> None:
    bootstrap = Bootstrap(url="http://p:8998", engines={0: "a", 1: "b", 2: "c"})
    seen = {mooncake(f"{number:08x}", bootstrap, concurrent=True).prefill_headers[0][1] for number in range(3)}
    assert seen == {b"0", b"1", b"2"}
    alone = mooncake("0" * 32, Bootstrap(url="u", engines={0: "a"}), concurrent=True)
    assert alone.prefill_headers == []


@pytest.mark.parametrize(
    "answer", [b"{}", b"[]", b"nonsense", b'{"0": {"engine_id": "a", "worker_addr": {}}}', b'{"x": {"engine_id": "a"}}']
)
def test_what_is_no_bootstrap_servers_answer(answer: bytes) -> None:
    assert read_bootstrap("http://p:8998", answer) is None


def test_what_is_told_wins_over_what_is_found() -> None:
    from kvferry.router.instances.instance import Instance

    p = Instance("prefill", "http://p:1")
    config = RouterConfig(decode_url=("d:1",), protocol="nixl")
    for facts in (NotProbed(), VllmFacts()):
        p.facts = facts
        make_form = choose_form(config, p, [])
        assert make_form is not None
        assert make_form("0" * 32).protocol == "nixl"


def test_pairs() -> None:
    assert not can_pair(VllmFacts(), InstanceFacts())
    assert not can_pair(InstanceFacts(), VllmFacts())
    for facts in (InstanceFacts(connector="P2pConnector"), VllmFacts(), NotProbed(), UnknownFacts()):
        assert can_pair(facts, facts)
        assert can_pair(facts, NotProbed())
        assert can_pair(UnknownFacts(), facts)


@pytest.mark.parametrize(("asked", "kind", "reason"), [(0.0, "whole", "no_ticket"), (64.0, "sequential", "")])
async def test_a_server_without_a_connector_computes_no_prompts_for_others(
    asked: float, kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose connector leaves the KV in a store has asked that for each prompt."""

    async def computed(peer: Peer, request: Request, body: Any) -> Response:
        return JSONResponse({"choices": [{"text": "x"}]})

    async def metrics(peer: Peer) -> str:
        return f'vllm:external_prefix_cache_queries_total{{engine="0"}} {asked}\n'

    p, d = Peer("prefill", computed, vllm="0.32.0", metrics=metrics), Peer("decode", answer, vllm="0.32.0")
    async with instances(p, d), routing([p.url], [d.url], health_interval_s=0.02) as (router, url):
        prefill = router.services.pools.prefill.instances[0]
        for _ in range(3):
            assert (await post(url))[0] == 200
            assert (await get(url, "/kvferry/decisions"))[1].count('"no_prefill"') == 0
            await eventually(lambda: not prefill.process.gave_no_ticket)
            await eventually(lambda: bool(asked) or prefill in router.services.pools.prefill.hand_off_exclusions)
        text = (await get(url, "/metrics"))[1]
    assert f'hand_offs_total{{kind="{kind}",reason="{reason}"}} {2.0 if kind == "whole" else 3.0}' in text
    assert len(p.calls) == (1 if kind == "whole" else 3)
    assert caplog.text.count("has no KV connector") == (kind == "whole")
