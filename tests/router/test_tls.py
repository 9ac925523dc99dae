"""The router with TLS on both sides: towards clients, and towards instances at https:// URLs."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest

from kvferry.http.config import HttpConfig, InstanceAccess
from router.peers import CONCURRENT, DECODE, Peer, answer, instances, routing, ticket
from router.test_hand_off import BODY
from support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def ask(url: str, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    async with aiohttp.ClientSession() as session, session.post(url, json=BODY, ssl=context) as response:
        await response.read()
        return response.status


async def test_tls_on_both_sides(authority: Authority) -> None:
    cert, key = authority.issue()
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    http = HttpConfig(tls_cert=cert, tls_key=key, shutdown_grace_s=1)
    access = InstanceAccess(instance_ca=authority.ca)
    async with (
        instances(p, d, tls=authority.issue("instance")),
        routing([p.url], [d.url], http, access=access) as (_, url),
    ):
        assert p.url.startswith("https://")
        assert url.startswith("https://")
        assert await ask(f"{url}/v1/completions", authority.ca) == 200
        with pytest.raises(aiohttp.ClientError):
            await ask(f"{url.replace('https', 'http')}/v1/completions", authority.ca)
    assert (len(p.calls), len(d.calls)) == (1, 1)


async def test_an_instance_that_nobody_vouches_for_gets_no_request(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    d = Peer("decode", answer, facts=DECODE)
    async with (
        instances(d, tls=stranger.issue()),
        routing([], [d.url], access=InstanceAccess(instance_ca=authority.ca)) as (_, url),
    ):
        assert await ask(f"{url}/v1/completions", authority.ca) in (502, 503)
    assert not d.calls


async def test_instances_that_ask_for_a_certificate_are_shown_one(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("router")
    joined = tmp_path / "joined.pem"
    joined.write_text(cert.read_text() + key.read_text())
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d, tls=authority.issue("instance"), client_ca=authority.ca):
        for shown, status in ((joined, {200}), (None, {502, 503})):
            access = InstanceAccess(instance_ca=authority.ca, instance_cert=shown)
            async with routing([], [d.url], access=access) as (_, url):
                assert await ask(f"{url}/v1/completions", authority.ca) in status
    assert len(d.calls) == 1
