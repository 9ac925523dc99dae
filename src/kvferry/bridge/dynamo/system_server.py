"""The system server of one of Dynamo's workers (`DYN_SYSTEM_PORT`): its health, and the load of its engine.

As of Dynamo 1.7.0.dev20261026: `/health` is 200 once the worker's endpoints are ready and 503 otherwise, and `/metrics`
has vLLM's metrics beside Dynamo's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from kvferry.core.errors import TransferError
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin

logger = logging.getLogger(__name__)

_METRICS = {
    b"vllm:num_requests_running": "num_running",
    b"vllm:num_requests_waiting": "num_waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage",
}


@dataclass(frozen=True)
class WorkerLoad:
    """Requests that the engine computes and that wait in it, of all clients; share of its KV cache in use, 0 to 1."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class SystemServer:
    """Follows one worker's system server until cancelled. `interval_s`: between two looks; `timeout_s`: of each
    answer."""

    max_bytes = 4 * 2**20
    max_failures = 3
    """Answers that may fail in a row before the worker counts as unhealthy: a busy worker answers late."""

    def __init__(self, url: str, *, interval_s: float = 1.0, timeout_s: float = 2.0) -> None:
        """Raises `ConfigError` for a malformed URL."""
        self._origin, self._interval_s, self._timeout_s = Origin.parse(url, "system server"), interval_s, timeout_s
        self._num_failures = 0
        self.load: WorkerLoad | None = None
        """None: its metrics cannot be read, or have none of vLLM's."""

    @property
    def healthy(self) -> bool:
        """False while it answers that the worker is not ready, or repeatedly does not answer."""
        return self._num_failures < self.max_failures

    async def run(self) -> None:
        """Look at it until cancelled."""
        async with HttpClient(client_name="the helper of Dynamo's workers") as client:
            while True:
                was_healthy = self.healthy
                try:
                    await self._look(client)
                except TransferError as error:
                    self._num_failures += 1
                    reason = str(error)
                else:
                    reason = "it answers that the worker is not ready"
                if self.healthy != was_healthy:
                    logger.log(*_transition(self._origin, reason, is_healthy=self.healthy))
                await asyncio.sleep(self._interval_s)

    async def _look(self, client: HttpClient) -> None:
        status, _, _ = await client.ask(self._origin, "GET", "/health", timeout_s=self._timeout_s)
        self._num_failures = 0 if status == 200 else self._num_failures + 1
        self.load = await self._read_load(client)

    async def _read_load(self, client: HttpClient) -> WorkerLoad | None:
        try:
            status, _, text = await client.ask(
                self._origin, "GET", "/metrics", timeout_s=self._timeout_s, max_bytes=self.max_bytes
            )
        except TransferError:
            return None
        return read_load(text) if status == 200 else None


def _transition(origin: Origin, reason: str, *, is_healthy: bool) -> tuple[int, str]:
    if is_healthy:
        return logging.INFO, f"the worker's system server at {origin} answers again"
    return logging.WARNING, f"the worker's system server at {origin}: {reason}; it gets no requests until it is ready"


def read_load(metrics: bytes) -> WorkerLoad | None:
    """The load in a text of metrics; samples of several data-parallel ranks are added up, and of KV in use the largest
    share counts. None: it has no metrics of vLLM's."""
    values: dict[str, float] = {}
    for name, value in _samples(metrics):
        before = values.get(name, 0.0)
        values[name] = max(before, value) if name == "kv_usage" else before + value
    if not values:
        return None
    counts = {name: max(0, int(values.get(name, 0.0))) for name in ("num_running", "num_waiting")}
    return WorkerLoad(**counts, kv_usage=min(1.0, max(0.0, values.get("kv_usage", 0.0))))


def _samples(metrics: bytes) -> Iterator[tuple[str, float]]:
    lines = [line for line in metrics.split(b"\n") if line.partition(b"{")[0].partition(b" ")[0] in _METRICS]
    try:
        for family in text_string_to_metric_families(b"\n".join([*lines, b""]).decode(errors="replace")):
            for sample in family.samples:
                if isfinite(sample.value) and abs(sample.value) < 2**53:
                    yield _METRICS[sample.name.encode()], sample.value
    except ValueError as error:
        logger.debug("a worker's metrics cannot be read: %s", error)
