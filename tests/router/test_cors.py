"""Requests of pages in a browser, which first ask whether they may (CORS)."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvferry.core.errors import ConfigError
from kvferry.http.server.config import HttpConfig
from router.peers import DECODE, Peer, answer, instances, routing
from router.request.test_hand_off import BODY

PAGE = "http://localhost:3000"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


async def from_a_page(origins: tuple[str, ...], path: str, **settings: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The headers of the answers to a preflight, and to the request that a page would send after it."""

    async def answer_with_cors(peer: Peer, request: Request, body: Any) -> Response:
        response = await answer(peer, request, body)
        response.headers["Access-Control-Allow-Origin"] = "https://other.example"
        return response

    d = Peer("decode", answer_with_cors, facts=DECODE)
    http = HttpConfig(allowed_origins=origins, api_key=("key",), shutdown_grace_s=1)
    method = "POST" if path.startswith("/v1/completions") else "GET"
    headers = {"Origin": PAGE, "Authorization": "Bearer key"}
    async with instances(d), routing([], [d.url], http) as (_, url), aiohttp.ClientSession() as session:
        async with session.options(url + path, headers=PREFLIGHT) as preflight:
            before = {"status": str(preflight.status), **preflight.headers}
        async with session.request(method, url + path, json=BODY, headers=headers) as response:
            after = {"status": str(response.status), **response.headers}
            assert len(response.headers.getall("Access-Control-Allow-Origin", [])) <= 1
    return before, after


@pytest.mark.parametrize("origins", [("*",), ('["*"]',), (PAGE,), ('["https://a.example", "http://LOCALHOST:3000"]',)])
async def test_a_page_of_an_allowed_origin(origins: tuple[str, ...]) -> None:
    before, after = await from_a_page(origins, "/v1/completions")
    assert (before["status"], after["status"]) == ("204", "200")
    expected = "*" if "*" in origins[0] else PAGE
    assert before["Access-Control-Allow-Origin"] == after["Access-Control-Allow-Origin"] == expected
    assert before["Access-Control-Allow-Methods"] == "POST"
    assert before["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert ("Vary" in after) == (expected == PAGE)


async def test_an_error_can_be_read_by_the_page() -> None:
    _, after = await from_a_page(("*",), "/v1/nothing")
    assert (after["status"], after["Access-Control-Allow-Origin"]) == ("404", "*")


async def test_pages_of_other_origins() -> None:
    before, after = await from_a_page(("https://a.example",), "/v1/completions")
    assert before["status"] == "400"
    assert "Access-Control-Allow-Origin" not in before
    assert after.get("Access-Control-Allow-Origin") != PAGE


async def test_no_page_is_allowed_by_default() -> None:
    before, after = await from_a_page((), "/v1/completions")
    assert before["status"] == "401"
    assert "Access-Control-Allow-Methods" not in before
    assert after["Access-Control-Allow-Origin"] == "https://other.example", "an instance's own is left alone"


@pytest.mark.parametrize("path", ["/metrics", "/kvferry/instances", "/kvferry/instances/add"])
async def test_what_shows_or_changes_the_deployment_is_for_no_page(path: str) -> None:
    before, after = await from_a_page(("*",), path)
    assert before["status"] != "204"
    assert "Access-Control-Allow-Origin" not in {*before, *after}


@pytest.mark.parametrize("origins", ["example.com", "https://a.example/", "https://a.example/page", '["*"', "[7]", ""])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        HttpConfig(allowed_origins=(origins,))
