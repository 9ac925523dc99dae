"""Tables of routes: exact paths, prefixes, ids, and what is not there."""

from __future__ import annotations

import pytest

from kvferry.core.messages.openai import UnknownRoute
from kvferry.http.errors import MethodNotAllowed
from kvferry.http.server.request import Caller, HttpRequest, path_of
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes


async def handle(request: HttpRequest, response: Response) -> None:
    raise NotImplementedError


def asked(method: str, target: str) -> HttpRequest:
    body: object = None
    return HttpRequest(method, target, path_of(target), [], {}, body, "id", "::1", Caller(b"::1"), 0.0)  # type: ignore[arg-type]


TABLE = [
    Route("GET", "/a", handle),
    Route("POST", "/a", handle),
    Route("GET", "/files/*", handle),
    Route("DELETE", "/items/{id}", handle),
    Route("GET", "/items/{id}/parts", handle),
]


@pytest.mark.parametrize(
    ("method", "target", "path", "rest"),
    [
        ("GET", "/a?x=/b", "/a", ""),
        ("POST", "/a", "/a", ""),
        ("HEAD", "/a", "/a", ""),
        ("GET", "/files/x/y", "/files/*", "x/y"),
        ("GET", "/files/", "/files/*", ""),
        ("DELETE", "/items/a.b", "/items/{id}", "a.b"),
        ("GET", "/items/7/parts", "/items/{id}/parts", "7"),
    ],
)
def test_a_request_finds_its_route_and_the_rest_of_its_path(method: str, target: str, path: str, rest: str) -> None:
    request = asked(method, target)
    route = Routes(TABLE).find(request)
    assert (route.path, request.rest) == (path, rest)


@pytest.mark.parametrize("target", ["/", "/b", "/a/", "/items/", "/items/a/b/parts", "/items/7/parts/x", "/file"])
def test_what_is_not_there_is_404(target: str) -> None:
    with pytest.raises(UnknownRoute, match=r"Invalid URL \(GET"):
        Routes(TABLE).find(asked("GET", target))


def test_another_method_is_405_with_those_that_there_are() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        Routes(TABLE).find(asked("PUT", "/a"))
    assert caught.value.allowed == ("GET", "POST")
    with pytest.raises(MethodNotAllowed):
        Routes(TABLE).find(asked("GET", "/items/7"))


def test_a_fallback_gets_what_the_table_does_not_have() -> None:
    rest = Route("*", "*", handle)
    routes = Routes(TABLE, rest)
    assert routes.find(asked("PUT", "/anything")) is rest
    assert routes.find(asked("GET", "/a")) is not rest


def test_a_404_may_be_explained() -> None:
    routes = Routes(TABLE, explain=lambda path: "it has moved" if path == "/old" else None)
    with pytest.raises(UnknownRoute, match="it has moved"):
        routes.find(asked("GET", "/old"))
    with pytest.raises(UnknownRoute, match="Invalid URL"):
        routes.find(asked("GET", "/other"))
