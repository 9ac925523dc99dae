"""Serves one engine over HTTP until the process is told to end."""

from __future__ import annotations

from contextlib import nullcontext

from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.engine_protocol import EngineFront
from kvferry.http.registrar import RegisteredServer, RegistrarConfig
from kvferry.http.server import OnListening, signals_end


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
