"""The OpenAI server of one engine: its table of routes, and serving them until the process is told to end."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.endpoint import chat_route, completions_route
from kvferry.engine.server.engine_protocol import EngineFront
from kvferry.engine.server.utility_routes import UtilityRoutes
from kvferry.http.registrar import RegisteredServer, RegistrarConfig
from kvferry.http.routes import Route, Routes
from kvferry.http.server import HttpServer, OnListening, signals_end


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


async def serve(
    front: EngineFront,
    config: ServerConfig | None = None,
    *,
    seed: int | None = None,
    on_listening: OnListening | None = None,
    handle_signals: bool = True,
    registrar: RegistrarConfig | None = None,
) -> None:
    """Serve `front` until the process is told to end, then return; the engine is the caller's to close.

    SIGINT and SIGTERM begin the end when `handle_signals` (which needs the main thread); a second one cuts it short.
    Until then it is registered at the routers that `registrar` names.
    Raises `ConfigError` when the address cannot be listened on, or a file that the settings name not be read.
    """

    async def healthy() -> bool:
        return front.healthy

    server = RegisteredServer(build_app(front, config, seed=seed).server(), registrar, healthy)
    with signals_end(server) if handle_signals else nullcontext():
        await server.run(on_listening)
