"""The OpenAI server of one engine: its routes, and serving them until the process is stopped (`shutdown_signals`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from kvferry.api.dialects.response_store import ResponseStore
from kvferry.api.dialects.translator import Translator
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.engine_protocol import EngineClient
from kvferry.engine.server.routes.dialect_routes import DialectRoutes
from kvferry.engine.server.routes.endpoint import chat_route, completions_route
from kvferry.engine.server.routes.other_paths import explain_path
from kvferry.engine.server.routes.utility_routes import UtilityRoutes
from kvferry.http.registrar import RegisteredServer, RegistrarConfig
from kvferry.http.server.http_server import HttpServer, OnListening, signals_end
from kvferry.http.server.routes import Route, Routes

MakePage = Callable[[ServerContext], Sequence[Route]]
"""The page is a room above the engine's, which gives it its own routes."""


@dataclass(frozen=True)
class App:
    """The routes of a server, and the context that its handlers share."""

    context: ServerContext
    routes: Routes

    def server(self) -> HttpServer:
        """A server that is not listening yet."""
        return HttpServer(self.routes, self.context.config, self.context.lifecycle)


def build_app(
    engine_client: EngineClient,
    config: ServerConfig | None = None,
    *,
    seed: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
    page: MakePage | None = None,
) -> App:
    """The OpenAI server of one engine. `seed`: for requests without one; None: a random one for each. `page`: creates
    the routes of the page at `/`."""
    context = ServerContext(engine_client, config or ServerConfig(), seed=seed, clock=clock)
    chat, utilities = chat_route(context), UtilityRoutes(context)
    translator = Translator(ResponseStore(None, clock), clock)
    routes = [
        Route("POST", "/v1/completions", completions_route(context).handle),
        Route("POST", "/v1/chat/completions", chat.handle),
        *utilities.routes(),
        *DialectRoutes(translator, chat.answer, utilities.send_tokens).routes(),
        *(() if page is None else page(context)),
    ]
    return App(context, Routes(routes, explain=explain_path))


async def serve(
    engine_client: EngineClient,
    config: ServerConfig | None = None,
    *,
    seed: int | None = None,
    on_listening: OnListening | None = None,
    handle_signals: bool = True,
    registrar: RegistrarConfig | None = None,
    page: MakePage | None = None,
) -> None:
    """Serve an engine until the process is stopped (`shutdown_signals`). The caller closes the engine.

    With `handle_signals` (main thread only), a signal begins the shutdown, and a second one cuts it short.
    Until then, the instance is registered at the routers of `registrar`. Raises `ConfigError` if the address cannot be
    listened on, or a file in the settings cannot be read.
    """

    async def healthy() -> bool:
        return engine_client.healthy

    server = RegisteredServer(build_app(engine_client, config, seed=seed, page=page).server(), registrar, healthy)
    with signals_end(server) if handle_signals else nullcontext():
        await server.run(on_listening)
