"""The ASGI application: the routes, behind the boundary at which errors become answers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.endpoint import chat_route, completions_route
from kvferry.engine.server.engine_protocol import EngineFront
from kvferry.engine.server.errors import ErrorBoundary, http_error
from kvferry.engine.server.utility_routes import UtilityRoutes


def build_app(front: EngineFront, config: ServerConfig | None = None, *, seed: int | None = None) -> Starlette:
    """The OpenAI server of one engine. `seed` is for requests that bring none; None draws one for each.

    `app.state.context` is the `ServerContext`, by whose lifecycle the server ends.
    """
    context = ServerContext(front, config or ServerConfig(), seed=seed)
    app = Starlette(
        routes=[
            Route("/v1/completions", completions_route(context), methods=["POST"]),
            Route("/v1/chat/completions", chat_route(context), methods=["POST"]),
            *UtilityRoutes(context).routes(),
        ],
        middleware=[Middleware(ErrorBoundary)],
        exception_handlers={HTTPException: http_error},
    )
    app.state.context = context
    return app
