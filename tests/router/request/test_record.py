"""What can be seen of a request: its decision, its phases, its spans, and the metrics of all instances."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.http.server.config import HttpConfig
from kvferry.router.edge.fleet_metrics import merge
from router.peers import CONCURRENT, DECODE, Peer, answer, failing, instances, routing, serving, ticket, ticket_for
from router.request.test_hand_off import BODY, a_decode, a_prefill, get, post

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def telling(peer: Peer, request: Request, body: Any) -> Response:
    """P, which says how long it took and what it had."""
    params = ticket_for(peer, body)
    params["prefill_result"]["timeline"] = {
        "prefill_queued": 100.0,
        "prefill_started": 100.00001,
        "prefill_done": 100.00007,
    }
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    return JSONResponse({"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": params})


async def decisions(url: str, query: str = "") -> list[dict[str, Any]]:
    status, text = await get(url, f"/kvferry/decisions{query}")
    assert status == 200
    return json.loads(text)["decisions"]


async def test_a_decision_says_who_why_and_when() -> None:
    p, other, d = a_prefill(telling), a_prefill(telling), a_decode()
    async with (
        instances(p, other, d),
        routing([p.url, other.url], [d.url], policy="cost", hand_off="sequential") as (_, url),
    ):
        await post(url, {**BODY, "user": "somebody"}, **{"X-Request-Id": "mine"})
        (one,) = await decisions(url)
    assert (one["request_id"], one["policy"], one["model"]) == ("mine", "cost", "m")
    assert (one["prefill"], one["decode"], one["reason"]) == ("prefill-0", "decode-0", "split")
    assert set(one["scores"]) == {"prefill prefill-0", "prefill prefill-1"}, "there was one decode instance"
    timings = one["timings"]
    order = ["arrived", "routed", "prefill_sent", "prefill_answered", "decode_sent", "first_byte", "done"]
    assert [timings[name] for name in order] == sorted(timings[name] for name in order)
    assert timings["prefill"]["prefill_started"] == 100.00001
    assert one["prefill_usage"]["cached_tokens"] == 32
    assert one["has_session"] is True
    said = json.dumps(one)
    assert not any(secret in said for secret in ("somebody", BODY["prompt"], "127.0.0.1"))


async def test_what_failed_before_is_in_the_decision_too() -> None:
    bad, good, d = a_prefill(failing(500)), a_prefill(), a_decode()
    async with instances(bad, good, d), routing([bad.url, good.url], [d.url], hand_off="sequential") as (_, url):
        await post(url)
        (one,) = await decisions(url)
    assert one["attempts"] == [{"role": "prefill", "instance": "prefill-0", "reason": "500"}]
    assert one["prefill"] == "prefill-1"


async def test_only_the_last_decisions_are_kept_the_newest_first() -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url], max_decisions=3) as (_, url):
        for number in range(5):
            await post(url, **{"X-Request-Id": f"r{number}"})
        assert [one["request_id"] for one in await decisions(url)] == ["r4", "r3", "r2"]
        assert [one["request_id"] for one in await decisions(url, "?limit=1")] == ["r4"]
        assert await decisions(url, "?limit=0") == []
        many = "&".join(f"a{number}=1" for number in range(17))
        for wrong in ("limit=-1", "limit=x", "limit=9999999999", "limit=", "limit=1&limit=2", "limit=%D9%A3", many):
            assert (await get(url, "/kvferry/decisions?" + wrong))[0] == 400
        (one, *_) = await decisions(url)
        assert (one["prefill"], one["reason"]) == (None, "no_prefill")


async def test_decisions_are_for_operators() -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url], HttpConfig(admin_key=("secret",), shutdown_grace_s=1)) as (_, url):
        assert (await get(url, "/kvferry/decisions"))[0] == 401
        assert (await get(url, "/metrics?instances=all"))[0] == 401


async def test_why_is_logged_for_who_debugs(caplog: pytest.LogCaptureFixture) -> None:
    d = a_decode()
    with caplog.at_level(logging.DEBUG, "kvferry.router.choice.decisions"):
        async with instances(d), routing([], [d.url]) as (_, url):
            await post(url, **{"X-Request-Id": "mine"})
    assert "request mine: decode-0 (no_prefill, by round_robin" in caplog.text


async def test_a_client_that_asks_is_told_where_its_time_went() -> None:
    p, d = a_prefill(telling), a_decode()
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (_, url):
        _, _, headers = await post(url, **{"X-Kvferry-Server-Timing": "1"})
        _, _, without = await post(url)
        metrics = (await get(url, "/metrics"))[1]
    phases = dict(one.strip().split(";dur=") for one in headers["Server-Timing"].split(","))
    assert list(phases) == ["router", "prefill_queue", "prefill", "transfer_and_decode_queue", "first_byte"]
    assert float(phases["prefill"]) == 0.1
    assert "Server-Timing" not in without
    assert "x-kvferry-server-timing" not in p.calls[0].headers
    assert 'kvferry_router_phase_seconds_count{phase="prefill"} 2.0' in metrics
    assert "kvferry_router_disaggregate_from_tokens 0.0" in metrics


# The metrics of all instances.


async def test_the_metrics_of_all_instances_are_in_one_place() -> None:
    async def metrics(peer: Peer) -> str:
        return f'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{model_name="m"}} {len(peer.url)}\n'

    p, d = Peer("prefill", ticket, CONCURRENT, metrics=metrics), Peer("decode", answer, DECODE, metrics=metrics)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url):
        _, text = await get(url, "/metrics?instances=all")
        _, own = await get(url, "/metrics")
    for one, name in ((p, "prefill"), (d, "decode")):
        label = f'role="{name}",instance="{name}-0",model_name="m"'
        assert f"vllm:num_requests_running{{{label}}} {len(one.url)}\n" in text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'kvferry_router_instance_scraped{role="decode",instance="decode-0"} 1' in text
    assert "vllm:" not in own


def test_metrics_of_one_family_stand_together_and_what_is_none_is_left_out() -> None:
    one = (
        b"# HELP a:b_seconds Help.\n# TYPE a:b_seconds histogram\n"
        b'a:b_seconds_bucket{le="1.0",x="a,b=\\"}"} 3\na:b_seconds_sum 1e-05\na:b_seconds_count 3.0 1700000000\n'
        b"plain 1\nplain NaN\r\n"
    )
    odd = (
        b'plain{instance="forged",y="1"} 2\nno number\nevil{} 1\n{} 1\nx{a="1" 1\n\x00\xff 1\n# TYPE\nbad value 3 4 5\n'
        * 2
    )
    text = merge([("prefill", "p", one), ("decode", "d", odd), ("decode", "e", None)]).decode()
    lines = text.splitlines()
    assert 'a:b_seconds_bucket{role="prefill",instance="p",le="1.0",x="a,b=\\"}"} 3' in lines
    assert 'a:b_seconds_count{role="prefill",instance="p"} 3.0' in lines
    assert 'plain{role="decode",instance="d",y="1"} 2' in lines
    assert "forged" not in text
    assert "bad" not in text
    assert 'kvferry_router_instance_scraped{role="decode",instance="e"} 0' in lines
    plain = [place for place, line in enumerate(lines) if line.startswith("plain")]
    assert plain == list(range(plain[0], plain[0] + len(plain)))


# Spans.


class Collector:
    """An OpenTelemetry collector: takes spans over OTLP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/traces", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        self.spans += [span for one in sent.resource_spans for scope in one.scope_spans for span in scope.spans]
        return Response(content=b"", media_type="application/x-protobuf")


async def test_spans_cover_both_legs_and_instances_are_told_of_them() -> None:
    collector, p, d = Collector(), a_prefill(telling), a_decode()
    client = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "vendor=1"}
    async with serving(collector.app()) as where, instances(p, d):
        settings = {"hand_off": "sequential", "otlp_traces_endpoint": f"{where}/v1/traces"}
        async with routing([p.url], [d.url], **settings) as (_, url):
            await post(url, **client)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /v1/completions", "prefill", "queue", "decode", "first byte"} | set()
    whole = spans["POST /v1/completions"]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert whole.parent_span_id.hex() == "b7ad6b7169203331"
    legs = {name: [one for one in collector.spans if one.name == name] for name in ("prefill", "decode")}
    leg = next(one for one in legs["prefill"] if one.parent_span_id == whole.span_id)
    assert p.calls[0].headers["traceparent"] == f"00-{TRACE}-{leg.span_id.hex()}-01"
    assert d.calls[0].headers["traceparent"] == f"00-{TRACE}-{legs['decode'][0].span_id.hex()}-01"
    assert p.calls[0].headers["tracestate"] == "vendor=1"
    assert spans["queue"].parent_span_id == leg.span_id
    lasted = [one.end_time_unix_nano - one.start_time_unix_nano for one in legs["prefill"]]
    assert sum(abs(one - 60_000) < 1000 for one in lasted) == 1


async def test_without_an_endpoint_a_clients_trace_travels_as_it_came() -> None:
    p, d = a_prefill(), a_decode()
    mine = f"00-{TRACE}-b7ad6b7169203331-01"
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (_, url):
        await post(url, traceparent=mine)
    assert p.calls[0].headers["traceparent"] == d.calls[0].headers["traceparent"] == mine


async def test_a_leg_that_failed_is_a_span_with_an_error() -> None:
    collector, bad, d = Collector(), a_prefill(failing(500)), a_decode()
    async with serving(collector.app()) as where, instances(bad, d):
        async with routing([bad.url], [d.url], otlp_traces_endpoint=f"{where}/v1/traces", hand_off="sequential") as (
            _,
            url,
        ):
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(post(url))
    failed = [span for span in collector.spans if span.name == "prefill"]
    assert len(failed) == 3
    assert {span.status.message for span in failed} == {"500"}


async def test_an_endpoint_that_is_not_there_harms_no_request() -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url], otlp_traces_endpoint="http://127.0.0.1:1/v1/traces") as (_, url):
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=BODY) as response:
            assert response.status == 200
