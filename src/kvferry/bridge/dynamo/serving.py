"""Serves one worker over HTTP for as long as Dynamo's discovery has it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from kvferry.bridge.dynamo.card import ModelCard, read_card
from kvferry.bridge.dynamo.event_relay import EventRelay, KVEvents, PublishedEvents, TokenBlocks
from kvferry.bridge.dynamo.model import ModelFiles
from kvferry.bridge.dynamo.runtime import WorkerClient
from kvferry.bridge.dynamo.system_server import SystemServer
from kvferry.bridge.dynamo.worker import DynamoWorker
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.keys import http_secret, shared_token
from kvferry.core.messages.instance_facts import EventsAddress
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.engine.server.app import build_app
from kvferry.engine.server.config import ServerConfig
from kvferry.http.server.http_server import HttpServer

logger = logging.getLogger(__name__)

Listening = Callable[[DynamoWorker, str, int], object]
"""Called with the worker, and host and port of its server, once requests are answered."""


async def open_worker(
    client: WorkerClient,
    worker_id: int,
    read_model: Callable[[ModelCard], Awaitable[ModelFiles]],
    *,
    kv_events: EventsAddress | None = None,
    system_url: str = "",
    card_s: float = 5.0,
) -> DynamoWorker:
    """The worker, from its card and the files of its model. `system_url`: of its system server, if the card does not
    say where it is. `card_s`: for the store of cards to answer. Raises `ConfigError`."""
    card = await asyncio.to_thread(read_card, client.endpoint, worker_id, os.environ, card_s)
    model = await read_model(card)
    events = PublishedEvents(kv_events) if kv_events is not None else _events_of(client, worker_id, card)
    system = _system_of(system_url or card.system_url)
    return DynamoWorker(client, worker_id, card, model, token=shared_token(), kv_events=events, system=system)


def _system_of(url: str) -> SystemServer | None:
    try:
        return SystemServer(url) if url else None
    except ConfigError as error:
        logger.warning("a worker's system server is not followed: %s", error)
        return None


def _events_of(client: WorkerClient, worker_id: int, card: ModelCard) -> KVEvents:
    """The KV events that the worker publishes on Dynamo's event plane, if that is ZeroMQ."""
    if os.environ.get("DYN_EVENT_PLANE") != "zmq" or not card.kv_cache_block_size:
        return PublishedEvents()
    try:
        blocks = TokenBlocks(card.kv_cache_block_size)
        return EventRelay(client.endpoint, worker_id, blocks, os.environ, SYSTEM_CLOCK)
    except KvferryError as error:
        logger.warning("KV events of worker %x are not followed: %s", worker_id, error)
        return PublishedEvents()


async def serve_worker(
    worker: DynamoWorker,
    is_registered: Callable[[], bool],
    on_listening: Listening,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    grace_s: float,
    poll_interval_s: float,
) -> None:
    """Serve until `is_registered` returns False, or until cancelled. `poll_interval_s`: seconds between its calls;
    `grace_s`: for running answers at the end. Raises `ConfigError` if the address cannot be listened on."""
    config = ServerConfig(host=host, port=port, secret=http_secret(), shutdown_grace_s=grace_s)
    server = build_app(worker, config).server()
    following = BackgroundTasks()
    following.start(worker.kv_events.run())
    if worker.system is not None:
        following.start(worker.system.run())
    serving = asyncio.create_task(server.run(lambda host, port: on_listening(worker, host, port)))
    try:
        while is_registered() and not serving.done():
            await asyncio.wait([serving], timeout=poll_interval_s)
    finally:
        worker.leave()
        following.cancel()
        await _stop(server, serving)
        await following.close()
        await worker.close()


async def _stop(server: HttpServer, serving: asyncio.Task[None]) -> None:
    """End in stages; at once if this is cancelled meanwhile."""
    server.stop()
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.abort()
        await serving
