"""The OpenAI server of one engine, as a table of routes."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.endpoint import chat_route, completions_route
from kvferry.engine.server.engine_protocol import EngineFront
from kvferry.engine.server.utility_routes import UtilityRoutes
from kvferry.http.routes import Route, Routes
from kvferry.http.server import HttpServer


@dataclass(frozen=True)
class App:
    """What a server serves, and what its handlers share."""

    context: ServerContext
    routes: Routes

    def server(self) -> HttpServer:
        """A server of it."""
        return HttpServer(self.routes, self.context.config, self.context.lifecycle)


def build_app(front: EngineFront, config: ServerConfig | None = None, *, seed: int | None = None) -> App:
    """The OpenAI server of one engine. `seed` is for requests that bring none; None draws one for each."""
    context = ServerContext(front, config or ServerConfig(), seed=seed)
    routes = [
        Route("POST", "/v1/completions", completions_route(context).handle),
        Route("POST", "/v1/chat/completions", chat_route(context).handle),
        *UtilityRoutes(context).routes(),
    ]
    return App(context, Routes(routes))
