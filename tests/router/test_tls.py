"""The router with TLS on both sides: towards clients, and towards instances at https:// URLs."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs

from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpConfig
from router.instances.test_registrations import registering, registrar
from router.peers import CONCURRENT, DECODE, SECRET, Peer, answer, instances, routing, ticket
from router.request.test_hand_off import BODY
from support.certificates import Authority
from support.waiting import eventually


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def ask(url: str, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    async with aiohttp.ClientSession() as session, session.post(url, json=BODY, ssl=context) as response:
        await response.read()
        return response.status


def trusting(authority: Authority) -> HttpConfig:
    return HttpConfig(tls_ca=authority.ca, shutdown_grace_s=1)


async def test_tls_on_both_sides(authority: Authority) -> None:
    cert, key = authority.issue()
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    http = HttpConfig(tls_cert=cert, tls_key=key, tls_ca=authority.ca, shutdown_grace_s=1)
    async with instances(p, d, tls=authority.issue("instance")), routing([p.url], [d.url], http) as (_, url):
        assert p.url.startswith("https://")
        assert url.startswith("https://")
        assert await ask(f"{url}/v1/completions", authority.ca) == 200
        with pytest.raises(aiohttp.ClientError):
            await ask(f"{url.replace('https', 'http')}/v1/completions", authority.ca)
    assert (len(p.calls), len(d.calls)) == (1, 1)


async def test_an_instance_that_nobody_vouches_for_gets_no_request(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d, tls=stranger.issue()), routing([], [d.url], trusting(authority)) as (_, url):
        assert await ask(f"{url}/v1/completions", authority.ca) in (502, 503)
    assert not d.calls


async def test_instances_that_ask_for_a_certificate_are_shown_one(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("router")
    joined = tmp_path / "joined.pem"
    joined.write_text(cert.read_text() + key.read_text())
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d, tls=authority.issue("instance"), client_ca=authority.ca):
        for shown, status in ((joined, {200}), (None, {502, 503})):
            access = InstanceAccess(instance_cert=shown)
            async with routing([], [d.url], trusting(authority), access=access) as (_, url):
                assert await ask(f"{url}/v1/completions", authority.ca) in status
    assert len(d.calls) == 1


WRONG = {
    "no authority": "the router trusts no authority .* its certificate .*: name one with --tls-ca of the router",
    "another authority": "the router trusts no authority .* its certificate .*: name one with --tls-ca of the router",
    "another name": "give https://127.0.0.1:[0-9]+ a --tls-cert for this one",
    "expired": "certificate has expired: renew --tls-cert of https://127.0.0.1",
    "no TLS": "start https://127.0.0.1:[0-9]+ with --tls-cert, or call it http://",
    "no https": "if it speaks TLS, call it https://",
    "no certificate": r"certificate of the router \(--instance-cert of a router\)",
    "a certificate of a stranger": "https://127.0.0.1:[0-9]+ may want .* of an authority in its --tls-ca",
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_names_the_side_and_its_flag(
    what: str, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path / "stranger")
    d, http, access = Peer("decode", answer, facts=DECODE), trusting(authority), InstanceAccess()
    served: dict[str, Any] = {"tls": authority.issue("instance")}
    match what:
        case "no authority":
            http = HttpConfig(shutdown_grace_s=1)
        case "another authority":
            http = trusting(stranger)
        case "another name":
            served["tls"] = authority.issue("instance", "elsewhere.example")
        case "expired":
            served["tls"] = authority.expired()
        case "no TLS":
            served = {}
        case "no certificate":
            served["client_ca"] = authority.ca
        case "a certificate of a stranger":
            served["client_ca"] = authority.ca
            cert, key = stranger.issue("router")
            (joined := tmp_path / "joined.pem").write_text(cert.read_text() + key.read_text())
            access = InstanceAccess(instance_cert=joined)
    async with instances(d, **served):
        url = d.url.replace("https:", "http:") if what == "no https" else d.url.replace("http:", "https:")
        async with routing([], [url], http, access=access, health_interval_s=0.02):
            await eventually(lambda: re.search(WRONG[what], caplog.text) is not None)


async def test_who_registers_is_told_which_side_must_change(authority: Authority, caplog: Any) -> None:
    """The router's authority, and then the instance's."""
    cert, key = authority.issue("router")
    d = Peer("decode", answer, facts=DECODE)
    ours = HttpConfig(tls_cert=cert, tls_key=key, secret=SECRET, shutdown_grace_s=1)
    async with instances(d, tls=authority.issue("instance")), routing([], [], ours, registration=True) as (_, url):
        async with registering(registrar(url, d)):
            await eventually(lambda: "name one with --tls-ca of the instance" in caplog.text)
        async with registering(registrar(url, d, ca=authority.ca)):
            await eventually(lambda: "name one with --tls-ca of the router" in caplog.text)
    assert "--advertise-url" not in caplog.text
    trusted = structs.replace(
        ours, tls_ca=authority.ca, tls_verify_clients=True
    )  # a signature does in place of a certificate
    async with (
        instances(d, tls=authority.issue("instance")),
        routing([], [], trusted, registration=True) as (router, url),
        registering(registrar(url, d, ca=authority.ca)),
    ):
        await eventually(lambda: [one.url for one in router.services.pools] == [d.url])
