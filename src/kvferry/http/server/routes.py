"""Chooses the handler of a request: exact paths first, then those with an id, then prefixes, then the fallback."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.core.messages.openai import UnknownRoute
from kvferry.http.errors import MethodNotAllowed
from kvferry.http.server.keys import Access
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response

Handler = Callable[[HttpRequest, Response], Coroutine[Any, Any, None]]
"""Answers through the response. It may raise a `RequestError` as its answer. It is cancelled as soon as the client
leaves without its whole answer, and when the server's grace period ends; it need not answer then."""


@dataclass(frozen=True)
class Route:
    """A route. `path` ends with * for a prefix, or has a segment `{id}`; the rest or the segment is `request.rest`. GET
    answers HEAD too, without the body."""

    method: str
    path: str
    handler: Handler
    access: Access = "key"


class Routes:
    """The routes of one server. `fallback` gets every path and method that the table does not contain. `explain`: the
    message of the 404 for such a path, without a fallback; None: there is nothing to say but that it is unknown."""

    def __init__(
        self,
        routes: Iterable[Route],
        fallback: Route | None = None,
        *,
        explain: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        self._explain = explain
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        self._with_id: dict[str, dict[str, Route]] = {}
        """Routes by the pattern of their paths."""
        self._fallback = fallback
        for route in routes:
            table, path = (self._prefixes if route.path.endswith("*") else self._exact), route.path.removesuffix("*")
            if "{id}" in path:
                table, path = self._with_id, "([^/]+)".join(map(re.escape, path.split("{id}")))
            table.setdefault(path, {})[route.method] = route

    def find(self, request: HttpRequest) -> Route:
        """The route of a request; sets its `rest`. Raises `UnknownRoute` or `MethodNotAllowed`."""
        methods = self._exact.get(request.path) or self._by_id(request) or self._by_prefix(request)
        if methods is None:
            if self._fallback is None:
                raise UnknownRoute(self._explain(request.path) or f"Invalid URL ({request.method} {request.path})")
            return self._fallback
        route = methods.get("GET" if request.method == "HEAD" and "HEAD" not in methods else request.method)
        if route is None:
            raise MethodNotAllowed(request.method, request.path, tuple(methods))
        return route

    def _by_id(self, request: HttpRequest) -> dict[str, Route] | None:
        for pattern, methods in self._with_id.items():
            if (match := re.fullmatch(pattern, request.path)) is not None:
                request.rest = match[1]
                return methods
        return None

    def _by_prefix(self, request: HttpRequest) -> dict[str, Route] | None:
        for prefix, methods in self._prefixes.items():
            if request.path.startswith(prefix):
                request.rest = request.path[len(prefix) :]
                return methods
        return None
