"""A worker of Dynamo's as a member of a fleet: starts it as a child, and serves it over HTTP until either ends.

    python -m kvferry.bridge.dynamo.member ROLE NAME HOST PORT GRACE_S -- COMMAND…

Without `DYN_DISCOVERY_BACKEND` in the environment, the worker is found through files of a private folder, and no etcd
or NATS is needed. It has a namespace of its own in any case, which distinguishes it from others.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from kvferry.bridge.dynamo.card import ModelCard
from kvferry.bridge.dynamo.model import ModelFiles, read_model
from kvferry.bridge.dynamo.runtime import DynamoRuntime, WorkerClient
from kvferry.bridge.dynamo.serving import open_worker, serve_worker
from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import DynamoEndpoint
from kvferry.core.messages.instance_facts import EventsAddress
from kvferry.core.runtime.process_exit import EXIT_USER_ERROR, exit_process, shutdown_deadline
from kvferry.core.runtime.threads import run_server
from kvferry.http.server.listen import authority
from kvferry.kv_events.sockets import require_endpoint
from kvferry.observe.logs import LogConfig, set_up_logging

logger = logging.getLogger(__name__)

_ANYWHERE = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
_SYSTEM_PORT = "DYN_SYSTEM_PORT"
_EVENTS = "--kv-events-config"

_FOLDER_PREFIX = "kvferry-dynamo-"
_LOCK = "lock"


@dataclass(frozen=True)
class MemberSettings:
    """The worker to start, and the address to serve it at. `role`: prefill, decode or both."""

    role: str
    name: str
    host: str
    port: int
    grace_s: float
    command: Sequence[str]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> MemberSettings:
        """Raises `ConfigError`."""
        try:
            role, name, host, port, grace_s, separator, *command = arguments
            if separator != "--" or not command:
                raise ValueError
            return cls(role, name, host, int(port), float(grace_s), command)
        except ValueError:
            raise ConfigError("expected ROLE NAME HOST PORT GRACE_S -- COMMAND…") from None

    @property
    def component(self) -> str:
        """The component at which Dynamo's vLLM workers of this role register themselves."""
        return "prefill" if self.role == "prefill" else "backend"

    def endpoint(self, namespace: str) -> DynamoEndpoint:
        """The worker's endpoint."""
        role: Literal["prefill", "decode"] = "prefill" if self.role == "prefill" else "decode"
        return DynamoEndpoint(namespace=namespace, component=self.component, role=role)


def worker_environment(settings: MemberSettings, environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Variables for the worker and for the runtime here, beside those that are `given`."""
    variables = {"DYN_NAMESPACE": f"kvferry-{settings.name}-{entropy.token_hex(4)}", "DYN_SELF_HOST_METADATA": "0"}
    if "DYN_DISCOVERY_BACKEND" not in environment:
        variables |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": folder}
        variables |= {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        variables |= dict.fromkeys(_ANYWHERE, settings.host)
    defaults = {"DYN_LOG": "warn"}
    return variables | {name: value for name, value in defaults.items() if name not in environment}


def published_events(command: Sequence[str]) -> EventsAddress | None:
    """The address at which the worker's vLLM publishes its KV events, by its `--kv-events-config`. Raises `ConfigError`
    for a malformed one."""
    texts = [argument.partition("=")[2] for argument in command if argument.startswith(f"{_EVENTS}=")]
    texts += [value for flag, value in pairwise(command) if flag == _EVENTS]
    for text in texts:
        try:
            config = msgspec.json.decode(text, type=dict[str, object])
        except msgspec.MsgspecError:
            return None  # vLLM reports it
        endpoint, replay = config.get("endpoint"), config.get("replay_endpoint")
        if isinstance(endpoint, str) and config.get("enable_kv_cache_events", True):
            addresses = [
                require_endpoint(str(address).replace("*", "127.0.0.1"), _EVENTS)
                for address in (endpoint, replay)
                if address
            ]
            return EventsAddress(endpoint=addresses[0], replay_endpoint=addresses[1] if len(addresses) > 1 else None)
    return None


class DynamoMember:
    """One worker's process, and its server. `system_port`: of the worker's system server; "": it has none.
    `poll_interval_s`: between two looks at Dynamo's discovery; `end_timeout_s`: for the worker to end after SIGTERM."""

    def __init__(
        self,
        settings: MemberSettings,
        system_port: str = "",
        *,
        poll_interval_s: float = 0.25,
        end_timeout_s: float = 20.0,
    ) -> None:
        self._settings, self._poll_interval_s, self._end_timeout_s = settings, poll_interval_s, end_timeout_s
        self._ended = asyncio.Event()
        self._system_port = system_port

    async def run(self) -> int:
        """Serve until a signal or the worker's end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        variables = (
            {_SYSTEM_PORT: self._system_port, "DYN_SYSTEM_HOST": self._settings.host} if self._system_port else {}
        )
        process = await asyncio.create_subprocess_exec(*self._settings.command, env={**os.environ, **variables})
        exiting = asyncio.create_task(process.wait())
        exiting.add_done_callback(lambda _: self._ended.set())
        runtime: DynamoRuntime | None = None
        try:
            runtime = DynamoRuntime()
            client = await runtime.client(self._settings.endpoint(os.environ["DYN_NAMESPACE"]))
            await self._serve(client)
        finally:
            code = await self._end(process, exiting)
            if runtime is not None:
                runtime.close()
        return code

    async def _serve(self, client: WorkerClient) -> None:
        while not (ids := client.worker_ids()):
            if await self._ended_within(self._poll_interval_s):
                return
        settings = self._settings
        worker = await open_worker(
            client,
            ids[0],
            _read_model,
            kv_events=published_events(settings.command),
            system_url=f"http://{authority(settings.host, int(port))}" if (port := self._system_port) else "",
        )
        await serve_worker(
            worker,
            lambda: not self._ended.is_set() and ids[0] in client.worker_ids(),
            lambda worker, host, port: logger.info("serving %s at port %d", worker.engine_id, port),
            host=settings.host,
            port=settings.port,
            grace_s=settings.grace_s,
            poll_interval_s=self._poll_interval_s,
        )

    async def _ended_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()

    async def _end(self, process: asyncio.subprocess.Process, exiting: asyncio.Task[int]) -> int:
        """End the worker; returns the exit code of this process: 0 if the worker was to end."""
        if exiting.done():
            logger.error("the worker has ended with code %d", exiting.result())
            return exiting.result() if exiting.result() > 0 else 1
        was_requested = self._ended.is_set()
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._end_timeout_s):
                await asyncio.shield(exiting)
        except TimeoutError:
            logger.warning("the worker did not end within %g s, and is killed", self._end_timeout_s)
            with suppress(ProcessLookupError):
                process.kill()
            await exiting
        if not was_requested:
            logger.error("the worker has left Dynamo's discovery")
        return 0 if was_requested else 1


async def _read_model(card: ModelCard) -> ModelFiles:
    return await asyncio.to_thread(read_model, card.source_path)


@contextmanager
def discovery_folder(parent: Path | None = None, *, min_age_s: float = 60.0) -> Iterator[str]:
    """Make a private folder for the files of Dynamo's discovery, and remove folders of killed processes, whose locks
    the kernel has released. `parent`: None is the folder for temporary files. `min_age_s`: a younger folder without a
    lock is being made."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent, min_age_s)
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        store = Path(folder, "store")
        store.mkdir()
        with Path(folder, _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield str(store)


def _remove_abandoned(parent: Path, min_age_s: float) -> None:
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.getuid() or folder.is_symlink():
                continue
            try:
                lock = (folder / _LOCK).open("rb")
            except FileNotFoundError:
                if SYSTEM_CLOCK.wall() - status.st_mtime > min_age_s:
                    shutil.rmtree(folder)
                continue
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except OSError:  # it is in use, or another process removes it
            continue


def main() -> None:
    """Run the member; leaves with 2 for what a user can correct."""
    set_up_logging(LogConfig(), "dynamo")
    with shutdown_deadline() as deadline, discovery_folder() as folder:
        try:
            settings = MemberSettings.parse(sys.argv[1:])
            published_events(settings.command)
            system_port = os.environ.pop(_SYSTEM_PORT, "")  # or the runtime of this process would listen there
            os.environ.update(worker_environment(settings, os.environ, folder))
            code = run_server(DynamoMember(settings, system_port).run())
        except ConfigError as error:
            logger.error("%s", error)
            code = EXIT_USER_ERROR
        deadline.begin()
    exit_process(code)


if __name__ == "__main__":
    main()
