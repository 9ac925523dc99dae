"""Both forms of the hand-off, what each leg is sent, and what happens when a leg fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.http.client.origin import Origin
from router.peers import (
    CONCURRENT,
    DECODE,
    Answering,
    Peer,
    answer,
    answer_late,
    answer_once_there_is_a_ticket,
    answer_when_told,
    cut,
    cut_in_stream,
    event,
    failing,
    instances,
    routing,
    ticket,
    ticket_for,
    ticket_when_told,
    unused_address,
)

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}
MODES = ["sequential", "concurrent"]


def a_prefill(answering: Answering = ticket, **facts: Any) -> Peer:
    """A prefill instance that offers concurrent hand-off."""
    return Peer("prefill", answering, facts={**CONCURRENT, **facts})


def a_decode(answering: Answering = answer, facts: dict[str, Any] | None = DECODE) -> Peer:
    return Peer("decode", answering, facts=facts)


async def post(
    url: str, body: Any = BODY, path: str = "/v1/completions", **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body, headers=headers) as response,
    ):
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else text, response.headers


# What each leg is sent.


def given(p: Peer, asked: dict[str, Any]) -> dict[str, Any]:
    """The ticket as D gets it: D is to answer with none of its own."""
    return {**ticket_for(p, asked), "keep_for_next_turn": False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trusted", [False, True])
async def test_decode_answers_with_a_ticket_only_where_clients_may_have_one(mode: str, trusted: bool) -> None:
    p, d = a_prefill(), a_decode()
    async with (
        instances(p, d),
        routing([p.url], [d.url], hand_off=mode, trust_client_tickets=trusted) as (_, url),
    ):
        assert (await post(url))[0] == 200
    assert d.calls[0].body["kv_transfer_params"].get("keep_for_next_turn") is (None if trusted else False)


async def test_sequential_gives_decode_the_ticket_of_prefill() -> None:
    p, d = a_prefill(), a_decode()
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (_, url):
        status, body, _ = await post(url)
    assert (status, body["choices"][0]["text"]) == (200, "done")
    asked = p.calls[0].body
    params = asked["kv_transfer_params"]
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert [params[key] for key in ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")] == [None] * 4
    assert (asked["max_tokens"], asked["n"], asked["stream"]) == (1, 1, False)
    assert d.calls[0].body == {**BODY, "seed": asked["seed"], "kv_transfer_params": given(p, asked)}
    assert p.released.empty()


async def test_concurrent_calls_decode_before_prefill_has_answered() -> None:
    p, d = a_prefill(ticket_when_told), a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        status, body, _ = await _with_go_once_both_are_called(p, d, post(url))
    assert (status, body["choices"][0]["text"]) == (200, "done")
    early = d.calls[0].body["kv_transfer_params"]
    assert early["transfer_id"] == p.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert (early["do_remote_prefill"], early["do_remote_decode"]) == (True, False)
    assert (early["remote_host"], early["remote_port"]) == ("127.0.0.1", 4711)
    assert early["remote_engine_id"] == "engine-p"
    assert p.calls[0].body["seed"] == d.calls[0].body["seed"]
    assert p.released.empty()


async def test_an_instance_that_gets_no_ticket_does_not_decide_how_the_others_do() -> None:
    p, d, plain = a_prefill(ticket_when_told), a_decode(), a_decode(facts={**DECODE, "connector": None})
    async with instances(p, d, plain), routing([p.url], [plain.url, d.url]) as (_, url):
        await _with_go_once_both_are_called(p, d, post(url))
    assert not plain.calls


async def test_decode_is_told_of_all_ranks_of_a_prefill_instance() -> None:
    p = a_prefill(ticket_when_told, kv_ranks=[["127.0.0.1", 4711], ["127.0.0.1", 4712]])
    d = a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        await _with_go_once_both_are_called(p, d, post(url))
    early = d.calls[0].body["kv_transfer_params"]
    assert (early["tp_size"], early["remote_ranks"]) == (2, [["127.0.0.1", 4711], ["127.0.0.1", 4712]])


def tells_of_stores(stores: list[str], **more: Any) -> Answering:
    """P: a ticket that says which stores took its KV; whole answers to requests without a hand-off."""

    async def answering(peer: Peer, request: Request, body: Any) -> Response:
        if "kv_transfer_params" not in body:
            return await answer(peer, request, body)
        params = {**ticket_for(peer, {"seed": 1, **body}), "remote_stores": stores}
        return JSONResponse({"choices": [], "kv_transfer_params": params})

    return answering


async def test_a_prefill_instance_whose_store_takes_nothing_is_left_out_until_it_does() -> None:
    """D would compute each prompt once more. The request that tells is answered by P, which has its KV; P itself tells
    when its store takes KV again."""
    stores: list[str] = []
    p, d = Peer("prefill", tells_of_stores(stores), facts={**CONCURRENT, "connector": "KVStoreConnector"}), a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (router, url):
        status, body, _ = await post(url)
        assert (status, body["choices"][0]["text"], len(d.calls)) == (200, "done", 0)
        assert p.calls[1].body == {**BODY, "seed": p.calls[0].body["seed"]}
        p.facts["stores_take_kv"] = False
        assert (await post(url))[0] == 200
        assert (len(p.calls), len(d.calls)) == (2, 1)
        stores.append("valkey")
        await router.health.probe(router.services.pools)
        assert (await post(url))[0] == 200
        assert len(p.calls) == 2
        p.facts["stores_take_kv"] = True
        await router.health.probe(router.services.pools)
        for _ in range(2):
            assert (await post(url))[0] == 200
    told = [one.body.get("kv_transfer_params", {}).get("remote_stores") for one in d.calls]
    assert told == [None, None, ["valkey"], ["valkey"]]


async def test_a_vllm_whose_store_takes_nothing_is_left_out_for_a_while() -> None:
    """It cannot be asked."""
    p, d = Peer("prefill", tells_of_stores([]), vllm="0.32"), Peer("decode", answer, vllm="0.32")
    async with instances(p, d), routing([p.url], [d.url]) as (router, url):
        for num_calls in (2, 2, 4):
            if num_calls == 4:
                router.services.pools.prefill.hand_off_exclusions.clear()  # as when their time is over
            assert (await post(url))[0] == 200
            assert len(p.calls) == num_calls
    assert len(d.calls) == 1


async def test_where_the_prefill_instance_cannot_answer_decode_gets_the_ticket_without_kv() -> None:
    async def only_prefills(peer: Peer, request: Request, body: Any) -> Response:
        if "kv_transfer_params" not in body:
            return JSONResponse({"error": {"message": "broken"}}, status_code=500)
        return await tells_of_stores([])(peer, request, body)

    p, d = Peer("prefill", only_prefills, facts={**CONCURRENT, "connector": "KVStoreConnector"}), a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        status, body, _ = await post(url)
    assert (status, body["choices"][0]["text"]) == (200, "done")
    assert [one.body["kv_transfer_params"]["remote_stores"] for one in d.calls] == [[]]


async def _with_go_once_both_are_called(p: Peer, d: Peer, request: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(request)
        await p.called.wait()
        await d.called.wait()
        p.go.set()
    return asked.result()


@pytest.mark.parametrize(
    ("hand_off", "prefill", "decode", "kind"),
    [
        ("auto", {}, {}, "concurrent"),
        ("auto", {"connector": "NixlConnector"}, {"connector": "NixlConnector"}, "concurrent"),
        ("auto", {"connector": "SharedStorageConnector"}, {"connector": "SharedStorageConnector"}, "sequential"),
        ("auto", {"kv_port": 0}, {}, "sequential"),
        ("auto", None, {}, "sequential"),
        ("auto", {}, None, "sequential"),
        ("auto", {}, {"connector": "SharedStorageConnector"}, "sequential"),
        ("sequential", {}, {}, "sequential"),
        ("concurrent", {"connector": "SomebodysConnector"}, {"connector": "SomebodysConnector"}, "concurrent"),
        ("concurrent", None, {}, "sequential"),
        ("concurrent", {}, None, "sequential"),
    ],
)
async def test_the_form_follows_what_instances_offer(
    hand_off: str, prefill: dict[str, Any] | None, decode: dict[str, Any] | None, kind: str
) -> None:
    p = Peer("prefill", ticket, facts=None if prefill is None else {**CONCURRENT, **prefill})
    d = a_decode(facts=None if decode is None else {**DECODE, **decode})
    async with instances(p, d), routing([p.url], [d.url], hand_off=hand_off) as (_, url):
        for _ in range(2):
            assert (await post(url))[0] == 200
        metrics = (await get(url, "/metrics"))[1]
    assert f'kvferry_router_hand_offs_total{{kind="{kind}",reason=""}} 2.0' in metrics
    assert p.num_asked == 1


async def get(url: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return response.status, await response.text()


async def test_a_seed_of_the_client_is_kept() -> None:
    p, d = a_prefill(), a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        await post(url, {**BODY, "seed": 5})
        await post(url, {**BODY, "seed": None})
        await post(url)
    seeds = [(one.body["seed"], two.body["seed"]) for one, two in zip(p.calls, d.calls, strict=True)]
    assert seeds[0] == (5, 5)
    for at_prefill, at_decode in seeds[1:]:
        assert at_prefill == at_decode
        assert 0 <= at_prefill < 2**63
    assert seeds[1] != seeds[2]


async def test_the_prefill_leg_asks_for_one_token_of_one_choice() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 64,
        "min_tokens": 10,
        "n": 4,
        "best_of": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "a_field_nobody_knows": {"deep": [1, 2.50, None]},
    }
    p, d = a_prefill(), a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        await post(url, body, "/v1/chat/completions")
    asked, decoded = p.calls[0].body, d.calls[0].body
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["min_tokens"], asked["n"]) == (1, 1, 1, 1)
    assert asked["stream"] is False
    assert not asked.keys() & {"stream_options", "best_of"}
    assert asked["a_field_nobody_knows"] == body["a_field_nobody_knows"]
    assert {key: decoded[key] for key in body} == body


async def test_a_client_cannot_point_instances_at_each_other() -> None:
    p, d = a_prefill(), a_decode()
    forged = {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        await post(url, {**BODY, "kv_transfer_params": forged})
        await post(url, {**BODY, "kv_transfer_params": forged, "echo": True})
    assert d.calls[0].body["kv_transfer_params"]["remote_host"] == "127.0.0.1"
    assert "kv_transfer_params" not in d.calls[1].body


@pytest.mark.parametrize("mode", MODES)
async def test_a_prefill_that_keeps_nothing_leaves_all_to_decode(mode: str) -> None:
    p, d = a_prefill(failing(200)), a_decode(answer_once_there_is_a_ticket)
    async with instances(p, d), routing([p.url], [d.url], hand_off=mode) as (_, url):
        assert (await post(url))[0] == 200
    assert d.calls[-1].body == BODY


async def test_a_prefill_at_a_known_address_that_is_another_process_is_asked_again() -> None:
    """D cannot fetch from the engine that was there before; P's own ticket says who is there now."""

    async def fetch(peer: Peer, request: Request, body: Any) -> Response:
        found = body["kv_transfer_params"]["remote_engine_id"] == p.facts["engine_id"]
        return await (answer if found else failing(502))(peer, request, body)

    p, d1, d2 = a_prefill(), a_decode(fetch), a_decode(fetch)
    async with instances(p, d1, d2), routing([p.url], [d1.url, d2.url]) as (router, url):
        assert (await post(url))[0] == 200
        p.facts = {**CONCURRENT, "engine_id": "engine-after-restart"}
        assert (await post(url))[0] == 200
        assert len(d1.calls) + len(d2.calls) == 3
        await router.health.probe(router.services.pools)
        assert p.num_asked == 2
        assert (await post(url))[0] == 200
        assert 'hand_offs_total{kind="concurrent",reason=""} 3.0' in (await get(url, "/metrics"))[1]
    assert len(d1.calls) + len(d2.calls) == 4


# Failures of the prefill leg.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", [failing(500), failing(429), failing(503), cut])
async def test_another_prefill_is_tried_once(mode: str, failure: Answering) -> None:
    bad, good, d = a_prefill(failure), a_prefill(), a_decode(answer_once_there_is_a_ticket)
    async with (
        instances(bad, good, d),
        routing([bad.url, good.url], [d.url], hand_off=mode) as (_, url),
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(post(url))
        await good.called.wait()
        d.go.set()
    assert asked.result()[0] == 200
    first, second = bad.calls[0].body, good.calls[0].body
    assert first["kv_transfer_params"]["transfer_id"] != second["kv_transfer_params"]["transfer_id"]
    last = d.calls[-1].body["kv_transfer_params"]
    assert last["transfer_id"] == second["kv_transfer_params"]["transfer_id"]
    assert d.disconnected.is_set() == (mode == "concurrent")


def naming(**named: Any) -> Answering:
    """P: a ticket with this transfer id, or none, and a request id by which D would find another hand-off."""

    async def answering(peer: Peer, request: Request, body: Any) -> Response:
        told = ticket_for(peer, body)
        del told["transfer_id"]
        return JSONResponse({"kv_transfer_params": {**told, "remote_request_id": "somebody-elses", **named}})

    return answering


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("named", [{"transfer_id": one} for one in ("somebody-elses", 7, {}, "", None)] + [{}])
async def test_a_ticket_of_another_hand_off_is_a_fault_of_prefill(mode: str, named: dict[str, Any]) -> None:
    """D could fetch what is meant for another request."""
    bad, good, d = a_prefill(naming(**named)), a_prefill(), a_decode(answer_once_there_is_a_ticket)
    async with (
        instances(bad, good, d),
        routing([bad.url, good.url], [d.url], hand_off=mode) as (_, url),
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(post(url))
        await good.called.wait()
        d.go.set()
        assert (await asked)[0] == 200
        own = [one.calls[0].body["kv_transfer_params"]["transfer_id"] for one in (bad, good)]
        assert await bad.released.get() == own[0]
        metrics = (await get(url, "/metrics"))[1]
    assert all(call.body["kv_transfer_params"]["transfer_id"] in own for call in d.calls)
    assert d.calls[-1].body["kv_transfer_params"]["transfer_id"] == own[1]
    assert 'leg_errors_total{instance="prefill-0",reason="wrong_ticket",role="prefill"} 1.0' in metrics


@pytest.mark.parametrize("named", [{"transfer_id": None}, {}])
async def test_another_engines_ticket_without_a_transfer_id_is_of_the_hand_off_that_it_was_asked_for(
    named: dict[str, Any],
) -> None:
    """vLLM's NixlConnector writes none."""
    p, d = Peer("prefill", naming(**named)), a_decode()
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        assert (await post(url))[0] == 200
    asked, (told,) = p.calls[0].body, [call.body["kv_transfer_params"] for call in d.calls]
    assert told == given(p, asked) | {"remote_request_id": "somebody-elses"}


@pytest.mark.parametrize("mode", MODES)
async def test_without_prefill_decode_does_both(mode: str) -> None:
    bad, d = a_prefill(failing(500)), a_decode(answer_once_there_is_a_ticket)
    async with instances(bad, d), routing([bad.url], [d.url], hand_off=mode) as (_, url):
        assert (await post(url))[0] == 200
        metrics = (await get(url, "/metrics"))[1]
    assert d.calls[-1].body == BODY
    assert 'hand_offs_total{kind="local",reason=""} 1.0' in metrics


async def test_a_prefill_that_cannot_be_reached_is_left_out_until_it_is_back() -> None:
    p, d = a_prefill(), a_decode()
    async with (
        unused_address() as nowhere,
        instances(p, d),
        routing([p.url], [d.url], hand_off="sequential") as (router, url),
    ):
        instance = router.services.pools.prefill.instances[0]
        address = instance.address
        instance.address = msgspec.structs.replace(address, origin=Origin.parse(nowhere))
        assert (await post(url))[0] == 200
        assert not instance.usable
        instance.address = address
        assert (await post(url))[0] == 200
        assert p.calls == []
        await router.health.probe([instance])
        assert (await post(url))[0] == 200
    assert len(p.calls) == 1
    assert [call.body.get("kv_transfer_params") is None for call in d.calls] == [True, True, False]


@pytest.mark.parametrize("mode", MODES)
async def test_a_refusal_of_prefill_is_the_clients_answer(mode: str) -> None:
    p, other, d = a_prefill(failing(400, "bad temperature")), a_prefill(), a_decode(answer_late)
    async with instances(p, other, d), routing([p.url, other.url], [d.url], hand_off=mode) as (_, url):
        status, body, _ = await post(url)
        if d.calls:
            await d.disconnected.wait()
    assert (status, body["error"]) == (400, {"message": "bad temperature", "from": "prefill"})
    assert other.calls == []
    assert p.released.empty()


async def test_a_failing_prefill_takes_decode_back_at_once() -> None:
    """D waits for KV that will never come; it is told by a closed connection, and called again on its own."""
    bad, d = a_prefill(failing(500)), a_decode(answer_late)
    async with instances(bad, d), routing([bad.url], [d.url]) as (_, url):
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(post(url))
            await d.disconnected.wait()
            d.go.set()
        assert asked.result()[0] == 200
        assert await bad.released.get() == bad.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert d.calls[0].body["kv_transfer_params"]["do_remote_prefill"]
    assert d.calls[-1].body == BODY


# Failures of the decode leg.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", [failing(500), failing(429), failing(503), cut])
async def test_another_decode_gets_the_same_ticket(mode: str, failure: Answering) -> None:
    p, bad, good = a_prefill(), a_decode(failure), a_decode()
    async with instances(p, bad, good), routing([p.url], [bad.url, good.url], hand_off=mode) as (_, url):
        assert (await post(url))[0] == 200
    assert len(p.calls) == len(bad.calls) == 1
    assert good.calls[0].body["kv_transfer_params"] == given(p, p.calls[0].body)
    assert good.calls[0].body["seed"] == p.calls[0].body["seed"]
    assert p.released.empty()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("failure", "status"), [(failing(400), 400), (failing(422), 422), (failing(429), 429), (failing(500), 500)]
)
async def test_an_error_of_the_only_decode_is_the_clients_answer(mode: str, failure: Answering, status: int) -> None:
    p, d = a_prefill(), a_decode(failure)
    async with instances(p, d), routing([p.url], [d.url], hand_off=mode) as (_, url):
        answered, body, _ = await post(url)
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert (answered, body["error"]) == (status, {"message": "no", "from": "decode"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [429, 503])
async def test_who_asks_to_be_left_alone_is_left_alone(mode: str, role: str, status: int) -> None:
    full = failing(status, **{"Retry-After": "3600"})
    busy = a_prefill(full) if role == "prefill" else a_decode(full)
    p, d = a_prefill(), a_decode()
    prefills = [busy, p] if role == "prefill" else [p]
    decodes = [busy, d] if role == "decode" else [d]
    async with (
        instances(busy, p, d),
        routing([one.url for one in prefills], [one.url for one in decodes], hand_off=mode) as (_, url),
    ):
        while not busy.calls:
            assert (await post(url))[0] == 200
        for _ in range(6):
            assert (await post(url))[0] == 200
    assert len(busy.calls) == 1


async def test_an_error_of_decode_keeps_its_headers() -> None:
    d = a_decode(failing(429, **{"Retry-After": "7"}))
    async with instances(d), routing([], [d.url]) as (_, url):
        _, _, headers = await post(url)
    assert headers["Retry-After"] == "7"


@pytest.mark.parametrize("mode", MODES)
async def test_a_decode_that_breaks_off_is_a_bad_gateway(mode: str) -> None:
    p, d = a_prefill(), a_decode(cut)
    async with instances(p, d), routing([p.url], [d.url], hand_off=mode) as (_, url):
        status, body, headers = await post(url, **{"X-Request-Id": "abc"})
        await p.released.get()
    assert status == 502
    assert body["error"]["type"] == "bad_gateway_error"
    assert headers["X-Request-Id"] == "abc"


@pytest.mark.parametrize("mode", MODES)
async def test_a_decode_that_cannot_be_reached_is_unavailable(mode: str) -> None:
    p = a_prefill()
    async with unused_address() as nowhere, instances(p), routing([p.url], [nowhere], hand_off=mode) as (_, url):
        status, body, _ = await post(url)
        if mode == "sequential":
            await p.released.get()
    assert status == 503
    assert body["error"]["type"] == "unavailable_error"


@pytest.mark.parametrize("mode", MODES)
async def test_where_no_decode_can_be_reached_a_prefill_instance_answers(mode: str) -> None:
    p = a_prefill(tells_of_stores(["valkey"]))
    async with unused_address() as nowhere, instances(p), routing([p.url], [nowhere], hand_off=mode) as (_, url):
        status, body, _ = await post(url)
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert (status, body["choices"][0]["text"]) == (200, "done")
    assert p.calls[1].body == BODY


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_that_breaks_off_ends_with_an_error_event(mode: str) -> None:
    p, d, other = a_prefill(), a_decode(cut_in_stream), a_decode()
    async with instances(p, d, other), routing([p.url], [d.url, other.url], hand_off=mode) as (_, url):
        status, text, _ = await post(url, {**BODY, "stream": True})
        await p.released.get()
    assert status == 200
    first, last, done = [line for line in text.split("\n\n") if line]
    assert first == event("one").decode().strip()
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "bad_gateway_error"
    assert done == "data: [DONE]"
    assert other.calls == []


# A client that leaves.


async def leave_after(url: str, body: dict[str, Any], until: Any) -> None:
    """Send a request, and close its connection once `until` is there."""
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        asked = group.create_task(session.post(url + "/v1/completions", json=body).__aenter__())
        await until
        asked.cancel()
        if asked.done():
            asked.result().close()


async def test_leaving_while_prefill_computes() -> None:
    p, d = a_prefill(ticket_when_told), a_decode()
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (_, url):
        await leave_after(url, BODY, p.called.wait())
        await p.disconnected.wait()
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]
    assert d.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_both_compute(stream: bool) -> None:
    p, d = a_prefill(ticket_when_told), a_decode(answer_late)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        await leave_after(url, {**BODY, "stream": stream}, _both_called(p, d))
        await p.disconnected.wait()
        await d.disconnected.wait()
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]


async def _both_called(p: Peer, d: Peer) -> None:
    await p.called.wait()
    await d.called.wait()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_decode_computes(mode: str, stream: bool) -> None:
    p, d = a_prefill(), a_decode(answer_late)
    async with instances(p, d), routing([p.url], [d.url], hand_off=mode) as (_, url):
        await leave_after(url, {**BODY, "stream": stream}, d.called.wait())
        await d.disconnected.wait()
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]


@pytest.mark.parametrize("mode", MODES)
async def test_leaving_in_the_middle_of_a_stream(mode: str) -> None:
    p, d = a_prefill(), a_decode(answer_when_told)
    async with instances(p, d), routing([p.url], [d.url], hand_off=mode) as (_, url):
        async with aiohttp.ClientSession() as session:
            response = await session.post(url + "/v1/completions", json={**BODY, "stream": True})
            assert await response.content.readany() == event("one")
            response.close()
        await d.disconnected.wait()
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]


async def test_another_engine_is_not_told_to_release() -> None:
    p, d = Peer("prefill", ticket, facts=None), a_decode(failing(400))
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        assert (await post(url))[0] == 400
    assert p.released.empty()


async def test_the_router_ends_with_requests_under_way() -> None:
    """Legs are cut and tickets released before the app is down."""
    p, d = a_prefill(), a_decode(answer_late)
    async with instances(p, d):
        async with asyncio.TaskGroup() as group, routing([p.url], [d.url]) as (_, url):
            asked = group.create_task(post(url))
            await d.called.wait()
        await d.disconnected.wait()
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]
    status, body, _ = asked.result()
    assert (status, body["error"]["type"]) == (503, "unavailable_error")
