"""Keys: whom the router serves, who sees addresses, and what instances are shown."""

from __future__ import annotations

from typing import Any

import aiohttp

from kvferry.http.server.config import HttpConfig
from kvferry.router.edge.fair_queue import FairQueue
from router.peers import CONCURRENT, DECODE, SECRET, Peer, answer, instances, routing, signed, ticket
from router.request.test_hand_off import BODY


async def test_clients_show_a_key_and_operators_see_addresses() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    http = HttpConfig(api_key=("client",), admin_key=("operator",), secret=SECRET, shutdown_grace_s=1)
    async with (
        instances(p, d),
        routing([p.url], [d.url], http) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        for key, path, status in (
            (None, "/v1/completions", 401),
            ("wrong", "/v1/completions", 401),
            ("client", "/v1/completions", 200),
            (None, "/health", 200),
            ("client", "/metrics", 401),
            ("client", "/kvferry/instances", 401),
            ("operator", "/metrics", 200),
            ("operator", "/kvferry/instances", 200),
            ("signed", "/kvferry/instances", 200),
        ):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            method = "POST" if path == "/v1/completions" else "GET"
            if key == "signed":
                headers = await signed(url, "operate", method, path)
            body = BODY if method == "POST" else None
            async with session.request(method, url + path, json=body, headers=headers) as response:
                assert response.status == status, (key, path)
                text = await response.text()
                assert (p.url in text) == (path == "/kvferry/instances" and status == 200)
    assert len(d.calls) == 1


async def test_without_keys_nobody_sees_addresses() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url]) as (_, url), aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            for path in ("/kvferry/instances", "/metrics", "/health"):
                async with session.get(url + path, headers=headers) as response:
                    text = await response.text()
                    assert response.status == 200
                    assert "127.0.0.1" not in text
                    assert "4711" not in text


async def test_one_client_is_one_tenant_however_it_writes_its_key(monkeypatch: Any) -> None:
    d = Peer("decode", answer, facts=DECODE)
    begin, written = FairQueue.begin, ["Bearer client", "bearer client", "BEARER   client ", "Bearer  \tclient"]
    for keys, headers in ((("client",), written), ((), [*written, "Bearer x", "Basic y"])):
        async with (
            instances(d),
            routing([], [d.url], HttpConfig(api_key=keys, shutdown_grace_s=1)) as (_, url),
            aiohttp.ClientSession() as session,
        ):
            tenants: set[bytes] = set()
            monkeypatch.setattr(
                FairQueue, "begin", lambda turns, one, to=tenants: (to.add(one.key), begin(turns, one))[1]
            )
            for header in headers:
                async with session.post(
                    url + "/v1/completions", json=BODY, headers={"Authorization": header}
                ) as response:
                    assert response.status == 200
            assert len(tenants) == 1
            assert not any(b"client" in one for one in tenants)
