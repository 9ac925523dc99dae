"""The state that the connections of a server share: settings, handlers, open connections and running requests; and the
rules by which pages of other origins may use the API."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from contextlib import suppress
from typing import Protocol

from kvferry.core.errors import Unavailable
from kvferry.core.keys import CHALLENGE_PATH
from kvferry.http.errors import Unauthorized
from kvferry.http.headers import RawHeaders
from kvferry.http.origins import ANY_ORIGIN, read_origins
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.keys import Guard, ListenerKind
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Handler, Routes
from kvferry.http.server.states import client_timeouts

logger = logging.getLogger(__name__)

_SPARE_FILES = 256
"""Descriptors reserved for everything but client connections; at most half of all."""

_MAX_AGE_S = 600


class ConnectedClient(Protocol):
    """A client's connection, as the server sees it."""

    client: str

    def check(self, now: float) -> None:
        """Enforce the client's deadlines."""

    def end_idle(self) -> None:
        """Close it if it has no request, nor one on its way; otherwise it closes after the answer."""

    def abort_request(self) -> None:
        """End the running request with the reason."""

    def abort(self) -> None:
        """Close it now."""


class Service:
    """Owns the connections and running handlers. `quiet` is set when a draining server has neither."""

    max_refusals = 64
    """Connections of one client beyond its limit that get an error as their answer; further ones are just closed."""

    def __init__(self, routes: Routes, config: HttpConfig, lifecycle: Lifecycle, guard: Guard) -> None:
        self.config, self.lifecycle, self.loop = config, lifecycle, asyncio.get_running_loop()
        self._routes, self.guard, self.timeouts = routes, guard, client_timeouts(config.limits)
        self._cors = Cors(read_origins(config.allowed_origins))
        self.connections: dict[ConnectedClient, None] = {}
        self.running: dict[ConnectedClient, None] = {}
        """Open connections, and connections whose handler runs; dicts, for a deterministic order."""
        self.quiet = asyncio.Event()
        self._per_client: Counter[str] = Counter()
        self._max_connections, self._spare = config.limits.http_connections, _SPARE_FILES
        self._num_refused = self._num_served = 0

    def limit_connections(self) -> None:
        """Adjust the limits to the number of files that this process may open; further connections get an error."""
        configured, limit = self._max_connections, _file_limit(self._max_connections + _SPARE_FILES)
        self._spare = min(_SPARE_FILES, limit // 2)
        self._max_connections = max(1, min(configured, limit - self._spare))
        if self._max_connections < configured:
            logger.warning(
                "at most %d connections are served at the same time, not %d: this process may open %d files; raise"
                " the limit (ulimit -n, LimitNOFILE=), or lower --http-connections",
                self._max_connections,
                configured,
                limit,
            )

    def admit(self, connection: ConnectedClient) -> Unavailable | None:
        """Count a connection; return the refusal if there are too many."""
        self.connections[connection] = None
        self._per_client[connection.client] += 1
        limit = self.config.limits.http_client_connections
        if len(self.connections) > self._max_connections:
            scope, limit = "", self._max_connections
        elif self._per_client[connection.client] > limit:
            scope = " from this address"
        else:
            return None
        self._num_refused += 1
        return Unavailable(f"{limit} connections{scope} are open, which is the limit; try again later")

    def is_crowded_by(self, client: str) -> bool:
        """True if not even connections of this client that only receive a refusal fit. Refused connections linger for a
        while, and an address that connects without end must not take other clients' slots with them."""
        surplus = self._per_client[client] - self.config.limits.http_client_connections
        return surplus > self.max_refusals or len(self.connections) > self._max_connections + self._spare // 2

    def forget(self, connection: ConnectedClient) -> None:
        """Forget a connection that is gone."""
        self.connections.pop(connection, None)
        self._per_client[connection.client] -= 1
        if self._per_client[connection.client] <= 0:
            del self._per_client[connection.client]
        self.update_quiet()

    def find_handler(
        self, request: HttpRequest, response: Response, side: ListenerKind, transport: asyncio.BaseTransport
    ) -> Handler:
        """Find the handler of a request that came by `transport`. Raises `RequestError`. While the server drains,
        clients that connected before still get an answer to their first request."""
        self._num_served += 1
        if side != "admin" and (preflight := self._cors.admit(request, response)) is not None:
            return preflight
        if self.lifecycle.draining and not request.opens:
            raise self.lifecycle.refusal()
        if request.path == CHALLENGE_PATH and request.method == "GET":
            return self.guard.challenge
        route = self._routes.find(request)
        request.caller = self.guard.admit(route.access, side, request)
        is_known = request.caller.is_signed or not self.config.tls_verify_clients
        if not (is_known or route.access == "open" or transport.get_extra_info("peercert")):
            raise Unauthorized("This server needs a client certificate of an authority in its --tls-ca")
        return route.handler

    def update_quiet(self) -> None:
        """Set `quiet` once no connection and no handler is left while the server drains; called when one has ended."""
        if self.lifecycle.draining and not self.connections and not self.running:
            self.quiet.set()

    def statistics(self) -> dict[str, int]:
        """Numbers of open connections, clients and running requests, and of requests served and refused so far."""
        return {
            "connections": len(self.connections),
            "clients": len(self._per_client),
            "running": len(self.running),
            "served": self._num_served,
            "refused": self._num_refused,
        }


def _file_limit(num_files: int) -> int:
    """Number of file descriptors that this process may open, after raising the limit towards `num_files` if
    possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_files:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(num_files, hard), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Cors:
    """Cross-origin requests of browsers (the CORS protocol of the Fetch standard): answers preflights, and adds headers
    that let a page of another origin read other answers. Keys come in headers, so cookies are never allowed
    (`access-control-allow-credentials`). Metrics and administration (/metrics, /kvferry/*) are never for pages."""

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    def admit(self, request: HttpRequest, response: Response) -> Handler | None:
        """Add headers to the answer if the page may read it. Return the handler of a preflight, which has no key and no
        route; None for other requests."""
        origin = request.first.get(b"origin")
        if origin is None or not self._origins or not _is_public(request.path):
            return None
        if (allowed := self._allowed(origin)) is not None:
            for header in allowed:
                response.add_header(*header)
        if request.method != "OPTIONS" or b"access-control-request-method" not in request.first:
            return None
        return _refuse_page if allowed is None else _allow_page

    def _allowed(self, origin: bytes) -> RawHeaders | None:
        expose = (b"access-control-expose-headers", b"*")
        if ANY_ORIGIN in self._origins:
            return [(b"access-control-allow-origin", b"*"), expose]
        if origin.decode("latin-1") not in self._origins:
            return None
        return [(b"access-control-allow-origin", origin), expose, (b"vary", b"origin")]


async def _allow_page(request: HttpRequest, response: Response) -> None:
    """Answer the preflight of an allowed page, for any method and headers."""
    headers = [
        (b"access-control-allow-methods", request.first[b"access-control-request-method"]),
        (b"access-control-max-age", b"%d" % _MAX_AGE_S),
    ]
    if (names := request.first.get(b"access-control-request-headers")) is not None:
        headers.append((b"access-control-allow-headers", names))
    response.send(204, b"", headers)


async def _refuse_page(request: HttpRequest, response: Response) -> None:
    """Answer the preflight of a page that is not allowed."""
    response.send(400, b"Disallowed CORS origin", [(b"content-type", b"text/plain; charset=utf-8")])


def _is_public(path: str) -> bool:
    return path != "/metrics" and not path.startswith("/kvferry/")
