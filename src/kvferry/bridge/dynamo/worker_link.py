"""The link to one of Dynamo's workers: its calls, its health, and the tasks that run for it in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.bridge.dynamo.messages import WorkerOutput, read_output
from kvferry.bridge.dynamo.runtime import WorkerClient, WorkerLost
from kvferry.core.errors import RequestError
from kvferry.core.runtime.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

_PROBE = "_HEALTH_CHECK"
"""Marks Dynamo's own health checks: a prefill worker keeps no KV for them."""


@dataclass(frozen=True)
class WorkerDeadlines:
    """`accept_s`, `silence_s`: as in `WorkerClient.call`; `probe_s`: seconds between two probes of a lost worker;
    `drain_timeout_s`: maximum seconds until the end of a stream whose last token has arrived."""

    accept_s: float = 5.0
    silence_s: float = 600.0
    probe_s: float = 1.0
    drain_timeout_s: float = 0.2


DEFAULT_DEADLINES = WorkerDeadlines()


class WorkerLink:
    """Owns the health of one worker. A worker that does not answer a call counts as lost until it answers a probe."""

    max_tasks = 64
    """Maximum number of background tasks; further ones are not started."""

    def __init__(
        self,
        client: WorkerClient,
        worker_id: int,
        vocab_size: int,
        probe_request: Mapping[str, Any],
        deadlines: WorkerDeadlines,
    ) -> None:
        """`probe_request`: the request of a probe, for a single token. It needs no other worker."""
        self._client, self._id, self._vocab_size, self._deadlines = client, worker_id, vocab_size, deadlines
        self._probe_request = probe_request
        self._is_removed = self._is_lost = False
        self._tasks = BackgroundTasks()
        self.num_outputs = 0
        """Number of outputs that the worker has sent, of all answers. Stands for the number of its engine's steps."""

    @property
    def name(self) -> str:
        """The worker as Dynamo's discovery names it."""
        return f"{self._client.endpoint.path}.{self._id:x}"

    @property
    def healthy(self) -> bool:
        """True if Dynamo's discovery has the worker, and the worker is not lost."""
        return not self._is_removed and not self._is_lost

    def leave(self) -> None:
        """Record that Dynamo's discovery no longer has the worker."""
        self._is_removed = True

    async def outputs(self, message: dict[str, Any]) -> AsyncGenerator[WorkerOutput]:
        """Send a request to the worker, and yield its outputs. Raises `RequestError`."""
        limits = self._deadlines
        call = self._client.call(self._id, message, accept_s=limits.accept_s, silence_s=limits.silence_s)
        try:
            async with aclosing(call) as outputs:
                async for data in outputs:
                    self.num_outputs += 1
                    yield read_output(data, self._vocab_size)
        except WorkerLost:
            self._mark_lost()
            raise
        except msgspec.ValidationError as error:
            raise WorkerLost(f"the answer of {self.name} cannot be read: {error}") from error

    async def drain(self, outputs: AsyncGenerator[WorkerOutput]) -> None:
        """Read the rest of an answer whose last token has arrived: otherwise the worker counts it as cancelled."""
        with suppress(TimeoutError, RequestError):
            async with asyncio.timeout(self._deadlines.drain_timeout_s):
                async for _ in outputs:
                    pass

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, unless too many run."""
        if len(self._tasks) >= self.max_tasks:
            work.close()
            return
        self._tasks.start(work)

    async def close(self) -> None:
        """Cancel the background tasks."""
        await self._tasks.close()

    def _mark_lost(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.run_in_background(self._probe())

    async def _probe(self) -> None:
        limits = self._deadlines
        while self._is_lost and not self._is_removed:
            await asyncio.sleep(limits.probe_s)
            message = {**self._probe_request, _PROBE: True}
            call = self._client.call(self._id, message, accept_s=limits.accept_s, silence_s=limits.accept_s)
            try:
                async with aclosing(call) as outputs:
                    async for _ in outputs:
                        self._is_lost = False
            except RequestError as error:
                logger.info("%s does not answer yet: %s", self.name, error)
