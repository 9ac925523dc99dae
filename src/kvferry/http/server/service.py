"""What the connections of one server share: settings, the handlers of requests, what is open and running."""

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
from kvferry.http.origins import read_origins
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.cors import Cors
from kvferry.http.server.keys import Guard, Side
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Handler, Routes
from kvferry.http.server.states import patience_with_clients

logger = logging.getLogger(__name__)

_SPARE_FILES = 256
"""Descriptors reserved for everything but client connections; at most half of all."""

_REFUSED_AT_ONCE = 64
"""Connections of one client beyond its limit that get an answer with the reason; further ones are just closed."""


class ConnectedClient(Protocol):
    """A client's connection, as the server sees it."""

    client: str

    def check(self, now: float) -> None:
        """Enforce the client's deadlines."""

    def end_idle(self) -> None:
        """Close it if no request is on it, nor on its way; otherwise it closes after the answer."""

    def abort_request(self) -> None:
        """End the running request with the reason."""

    def abort(self) -> None:
        """Close it now."""


class Service:
    """Owns the numbers of connections and of running handlers. `quiet` is set when a server that ends has neither."""

    def __init__(self, routes: Routes, config: HttpConfig, lifecycle: Lifecycle, guard: Guard) -> None:
        self.config, self.lifecycle, self.loop = config, lifecycle, asyncio.get_running_loop()
        self._routes, self.guard, self.patience = routes, guard, patience_with_clients(config.limits)
        self._cors = Cors(read_origins(config.allowed_origins))
        self.connections: dict[ConnectedClient, None] = {}
        self.running: dict[ConnectedClient, None] = {}
        """Open connections, and those whose handler runs; as dicts, for the same order in each run of a program."""
        self.quiet = asyncio.Event()
        self._per_client: Counter[str] = Counter()
        self._most, self._spare = config.limits.http_connections, _SPARE_FILES
        self._num_refused = self._num_served = 0

    def limit_connections(self) -> None:
        """Adjust the limits to the number of files that this process may open; further connections are refused with an
        answer."""
        wanted, limit = self._most, _file_limit(self._most + _SPARE_FILES)
        self._spare = min(_SPARE_FILES, limit // 2)
        self._most = max(1, min(wanted, limit - self._spare))
        if self._most < wanted:
            logger.warning(
                "at most %d connections are served at the same time, not %d: this process may open %d files; raise"
                " the limit (ulimit -n, LimitNOFILE=), or lower --http-connections",
                self._most,
                wanted,
                limit,
            )

    def admit(self, connection: ConnectedClient) -> Unavailable | None:
        """Count a connection; returns the refusal if there are too many."""
        self.connections[connection] = None
        self._per_client[connection.client] += 1
        most = self.config.limits.http_client_connections
        if len(self.connections) > self._most:
            where, most = "", self._most
        elif self._per_client[connection.client] > most:
            where = " from this address"
        else:
            return None
        self._num_refused += 1
        return Unavailable(f"{most} connections{where} are open, which is the limit; try again later")

    def is_crowded_by(self, client: str) -> bool:
        """Whether there is no room even for connections of this client that only receive a refusal. Refused clients are
        listened to for a while, and one address that connects without end is not to take others' places with that."""
        surplus = self._per_client[client] - self.config.limits.http_client_connections
        return surplus > _REFUSED_AT_ONCE or len(self.connections) > self._most + self._spare // 2

    def forget(self, connection: ConnectedClient) -> None:
        """Forget a connection that is gone."""
        self.connections.pop(connection, None)
        self._per_client[connection.client] -= 1
        if self._per_client[connection.client] <= 0:
            del self._per_client[connection.client]
        self.note_quiet()

    def handler_of(
        self, request: HttpRequest, response: Response, side: Side, transport: asyncio.BaseTransport
    ) -> Handler:
        """The handler of a request that came in by `transport`. Raises `RequestError`. While the server drains, clients
        whose connection it had accepted before, and who could not know, still get an answer to their first request."""
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

    def note_quiet(self) -> None:
        """Set `quiet` once nothing is left while the server drains; called when something has ended."""
        if self.lifecycle.draining and not self.connections and not self.running:
            self.quiet.set()

    def statistics(self) -> dict[str, int]:
        """What is open now, and what has been served and refused so far."""
        return {
            "connections": len(self.connections),
            "clients": len(self._per_client),
            "running": len(self.running),
            "served": self._num_served,
            "refused": self._num_refused,
        }


def _file_limit(wanted: int) -> int:
    """How many file descriptors this process may have, after raising the limit towards `wanted` as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
