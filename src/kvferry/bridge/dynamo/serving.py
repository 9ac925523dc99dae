"""Serves one worker over HTTP for as long as Dynamo's discovery has it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from kvferry.bridge.dynamo.card import ModelCard, read_card
from kvferry.bridge.dynamo.model import ModelFiles
from kvferry.bridge.dynamo.runtime import WorkerClient
from kvferry.bridge.dynamo.worker import DynamoWorker
from kvferry.core.keys import http_secret, shared_token
from kvferry.core.messages.instance_facts import EventsAddress
from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig
from kvferry.http.server.http_server import HttpServer

Listening = Callable[[DynamoWorker, str, int], object]
"""Called with the worker, and host and port of its server, once requests are answered."""


async def open_worker(
    client: WorkerClient,
    worker_id: int,
    read_model: Callable[[ModelCard], Awaitable[ModelFiles]],
    *,
    kv_events: EventsAddress | None = None,
    card_s: float = 5.0,
) -> DynamoWorker:
    """The worker, from its card and the files of its model. `card_s`: for the store of cards to answer. Raises
    `ConfigError`."""
    card = await asyncio.to_thread(read_card, client.endpoint, worker_id, os.environ, card_s)
    return DynamoWorker(client, worker_id, card, await read_model(card), token=shared_token(), kv_events=kv_events)


async def serve_worker(
    worker: DynamoWorker,
    is_there: Callable[[], bool],
    on_listening: Listening,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    grace_s: float,
    look_s: float,
) -> None:
    """Serve until `is_there` says no, or until cancelled. `look_s`: how often it is called, in seconds; `grace_s`: for
    running answers at the end. Raises `ConfigError` if the address cannot be listened on."""
    config = ServerConfig(host=host, port=port, secret=http_secret(), shutdown_grace_s=grace_s)
    server = build_app(worker, config).server()
    serving = asyncio.create_task(server.run(lambda host, port: on_listening(worker, host, port)))
    try:
        while is_there() and not serving.done():
            await asyncio.wait([serving], timeout=look_s)
    finally:
        worker.leave()
        await _stop(server, serving)
        await worker.close()


async def _stop(server: HttpServer, serving: asyncio.Task[None]) -> None:
    """End in stages; at once if this is cancelled meanwhile."""
    server.stop()
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.abort()
        await serving
