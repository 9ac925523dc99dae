"""The process that owns Dynamo's runtime for a router: each worker of its endpoints gets an OpenAI server on this
machine, whose URL is sent to the router. It ends when its standard input does, which is when the router is gone.

    python -m kvferry.bridge.dynamo.main PARENT_PID        messages: `core.messages.dynamo`
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from kvferry.bridge.dynamo.model import ModelFiles, read_model
from kvferry.bridge.dynamo.runtime import DynamoRuntime, WorkerClient
from kvferry.bridge.dynamo.serving import open_worker, serve_worker
from kvferry.bridge.dynamo.worker import DynamoWorker
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.messages.dynamo import BridgeSettings, WorkerUpdate
from kvferry.core.runtime.process_exit import exit_process, shutdown_deadline
from kvferry.core.runtime.threads import run_server
from kvferry.http.server.listen import authority
from kvferry.observe.logs import LogConfig, set_up_logging

logger = logging.getLogger(__name__)

_MAX_LINE = 2**20
_PR_SET_PDEATHSIG = 1


class Bridge:
    """The workers of some endpoints, and their servers. `poll_interval_s`: between two looks at Dynamo's discovery;
    `retry_interval_s`: before a worker that could not be served is tried again; `grace_s`: for answers of a worker that
    has left."""

    def __init__(
        self,
        settings: BridgeSettings,
        *,
        poll_interval_s: float = 0.25,
        retry_interval_s: float = 5.0,
        grace_s: float = 10.0,
    ) -> None:
        self._settings, self._poll_interval_s, self._retry_interval_s = settings, poll_interval_s, retry_interval_s
        self._grace_s = grace_s
        self._served: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._models: dict[str, asyncio.Task[ModelFiles]] = {}

    async def run(self, ended: asyncio.Event) -> None:
        """Serve the workers until `ended` is set."""
        runtime = DynamoRuntime()
        try:
            clients = [await runtime.client(endpoint) for endpoint in self._settings.endpoints]
            async with asyncio.TaskGroup() as group:
                while not ended.is_set():
                    self._reconcile(clients, group)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._poll_interval_s):
                            await ended.wait()
                for task in self._served.values():
                    task.cancel()
        finally:
            runtime.close()

    def _reconcile(self, clients: Iterable[WorkerClient], group: asyncio.TaskGroup) -> None:
        """Serve new workers; `_serve` ends by itself when a worker is gone."""
        for key in [key for key, task in self._served.items() if task.done()]:
            del self._served[key]
        for client in clients:
            for worker_id in client.worker_ids():
                key = (client.endpoint.path, worker_id)
                if key not in self._served:
                    self._served[key] = group.create_task(self._serve(client, worker_id))

    async def _serve(self, client: WorkerClient, worker_id: int) -> None:
        """Serve one worker for as long as Dynamo's discovery has it."""
        name = f"worker {worker_id:x} of {client.endpoint.path}"
        update: WorkerUpdate | None = None

        def listening(worker: DynamoWorker, host: str, port: int) -> None:
            nonlocal update
            url = f"http://{authority(host, port)}"
            update = WorkerUpdate(url=url, worker=worker.engine_id, role=client.endpoint.role, state="up")
            _send_update(update)

        def is_registered() -> bool:
            is_listed = worker_id in client.worker_ids()
            if not is_listed and update is not None:  # before its server stops
                _send_update(msgspec.structs.replace(update, state="gone"))
            return is_listed

        try:
            worker = await open_worker(client, worker_id, lambda card: self._model(card.source_path))
            await serve_worker(
                worker, is_registered, listening, grace_s=self._grace_s, poll_interval_s=self._poll_interval_s
            )
        except KvferryError as error:
            logger.error("%s cannot be served: %s", name, error)
            await asyncio.sleep(self._retry_interval_s)  # it stays in `_served` meanwhile
        except Exception:
            # A failure of one worker, as of its model card or tokenizer, does not stop the others.
            logger.exception("%s cannot be served", name)
            await asyncio.sleep(self._retry_interval_s)

    async def _model(self, source: str) -> ModelFiles:
        """The files of a model, read once. Raises `ConfigError`."""
        task = self._models.get(source)
        if task is None or (task.done() and task.exception() is not None):
            task = self._models[source] = asyncio.create_task(asyncio.to_thread(read_model, source))
        return await asyncio.shield(task)


def _send_update(update: WorkerUpdate) -> None:
    """Write a line for the router. The end of standard input tells that the router has ended."""
    with suppress(OSError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(update) + b"\n")


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent, even if it hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ConfigError("the process that has started this one is gone")


async def _run(settings: BridgeSettings) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), _read_end, ended)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await Bridge(settings).run(ended)


def _read_end(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        ended.set()


def _read_settings() -> BridgeSettings:
    """The first line of standard input, unbuffered. Raises `ConfigError`."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LINE:
        if not (chunk := os.read(sys.stdin.fileno(), 1)):
            break
        line += chunk
    try:
        return msgspec.json.decode(line, type=BridgeSettings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the settings cannot be read: {error}") from error


def main() -> None:
    """Run the bridge. Exits with status 2 for an error that a user can correct."""
    set_up_logging(LogConfig(), "dynamo")
    os.environ.setdefault("DYN_LOG", "warn")  # at "info", Dynamo's runtime writes lines for each request
    code = 0
    with shutdown_deadline() as deadline:
        try:
            _end_with_parent(int(sys.argv[1]))
            run_server(_run(_read_settings()))
        except ConfigError as error:
            logger.error("%s", error)
            code = 2
        deadline.begin()
    exit_process(code)  # threads of Dynamo's runtime are not waited for


if __name__ == "__main__":
    main()
