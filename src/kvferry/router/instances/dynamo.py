"""Dynamo's workers as instances, which join and leave with Dynamo's discovery.

A helper process owns Dynamo's runtime (`kvferry.bridge.dynamo`), which is native code, one per process, and may need
another Python. It reports the URL of each worker. Of the routers of a port, the first runs it. Owns the helper:
restarts it when it has ended, and ends it. The instances have leases, so that the instances of a killed router are
removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from kvferry.core.clock import Clock, doubling_waits
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.messages.dynamo import SCHEME, BridgeSettings, DynamoEndpoint, WorkerUpdate, parse_endpoint
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import BOOTSTRAP_PORT
from kvferry.router.instances.membership import Membership
from kvferry.router.instances.shared_state import SharedState

logger = logging.getLogger(__name__)

_MODULE = "kvferry.bridge.dynamo.main"


def dynamo_endpoints(config: RouterConfig) -> list[DynamoEndpoint]:
    """The Dynamo endpoints among the configured instances. Raises `ConfigError`."""
    endpoints = [parse_endpoint(url, "prefill") for url in config.prefill_url if url.startswith(SCHEME)]
    endpoints += [parse_endpoint(url, "decode") for url in config.decode_url if url.startswith(SCHEME)]
    paths = [endpoint.path for endpoint in endpoints]
    if len(set(paths)) < len(paths):
        raise ConfigError("an endpoint of Dynamo's is named twice; its workers have one role")
    return endpoints


class DynamoWorkers:
    """Runs the helper and follows its reports. `renew_s`: seconds between two renewals of the leases; `max_wait_s`:
    maximum seconds before the helper is restarted; `end_timeout_s`: seconds in which it must end by itself."""

    max_line = 64 * 1024

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        state: SharedState,
        clock: Clock,
        *,
        folder: Path | None = None,
        renew_s: float = 2.0,
        max_wait_s: float = 10.0,
        end_timeout_s: float = 12.0,
    ) -> None:
        """`folder`: the folder that the routers of a port share; None: a single router. Raises `ConfigError`."""
        self._endpoints = dynamo_endpoints(config)
        self._python = str(config.dynamo_python or sys.executable)
        if self._endpoints and not Path(self._python).is_file():
            raise ConfigError(f"--dynamo-python {self._python} is not a file; name a Python with ai-dynamo-runtime")
        self._lease_s, self._membership, self._state, self._clock = (
            config.registration_lease_s, membership, state, clock,
        )  # fmt: skip
        self._folder, self._renew_s, self._max_wait_s, self._end_timeout_s = folder, renew_s, max_wait_s, end_timeout_s
        self._workers: dict[str, WorkerUpdate] = {}

    async def watch(self) -> None:
        """Run the helper until cancelled, if there are endpoints of Dynamo."""
        if not self._endpoints:
            return
        async with self._helper_lock():
            waits = doubling_waits(0.25, self._max_wait_s)
            while True:
                begun = self._clock.monotonic()
                try:
                    code = await self._run()
                    logger.error("the helper for Dynamo's workers ended with code %s, and is started again", code)
                except OSError as error:
                    logger.error("the helper for Dynamo's workers cannot be started: %s", error)
                finally:
                    self._forget_all()
                if self._clock.monotonic() - begun > self._max_wait_s:
                    waits = doubling_waits(0.25, self._max_wait_s)
                await asyncio.sleep(next(waits))

    @asynccontextmanager
    async def _helper_lock(self) -> AsyncIterator[None]:
        """Hold the lock of the router of this port that runs the helper. The kernel releases it with the process."""
        if self._folder is None:
            yield
            return
        descriptor = os.open(self._folder / "dynamo.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(self._renew_s / 2)
            yield
        finally:
            os.close(descriptor)

    async def _run(self) -> int:
        """Run one helper until it ends. Returns its exit code."""
        process = await asyncio.create_subprocess_exec(
            *(self._python, "-m", _MODULE, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=self.max_line,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(BridgeSettings(endpoints=self._endpoints)) + b"\n")
            renewing = asyncio.create_task(self._renew())
            try:
                while line := await process.stdout.readline():
                    self._apply(line)
            except ValueError as error:  # a line that does not end
                logger.error("the helper for Dynamo's workers is ended: %s", error)
            finally:
                renewing.cancel()
        finally:
            process.stdin.close()
            await self._end(process)
        return process.returncode or 0

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(self._end_timeout_s):
                await process.wait()
        except (TimeoutError, asyncio.CancelledError):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise

    def _apply(self, line: bytes) -> None:
        try:
            update = msgspec.json.decode(line, type=WorkerUpdate)
        except msgspec.MsgspecError:
            logger.warning("the helper for Dynamo's workers wrote %r", line[:200])
            return
        try:
            if update.state == "gone":
                self._forget(update)
            else:
                self._add(update)
        except KvferryError as error:
            logger.error("Dynamo's worker %s: %s", update.worker, error)

    def _add(self, update: WorkerUpdate) -> None:
        self._workers[update.url] = update
        self._state.set_lease(update.url, update.worker, self._clock.monotonic() + self._lease_s)
        self._membership.supersede(update.url)
        instance = self._membership.register(update.role, update.url, BOOTSTRAP_PORT)
        logger.warning("%s (%s) is Dynamo's worker %s", instance, instance.url, update.worker)

    def _forget(self, update: WorkerUpdate) -> None:
        if self._workers.pop(update.url, None) is None:
            return
        self._state.end_lease(update.url)
        for instance in self._membership.at(update.url):
            logger.warning("%s (%s) has left Dynamo's discovery", instance, instance.url)
            self._membership.retire(instance, remove_when_drained=True)

    def _forget_all(self) -> None:
        for update in list(self._workers.values()):
            self._forget(update)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            for update in list(self._workers.values()):
                self._state.set_lease(update.url, update.worker, self._clock.monotonic() + self._lease_s)
