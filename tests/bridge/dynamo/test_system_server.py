"""The system server of a worker: what it says of health and load, and a server that is silent or says nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvferry.bridge.dynamo.system_server import SystemServer, WorkerLoad, read_load
from support.waiting import eventually

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",worker_id="a"} 3.0
vllm:num_requests_running{engine="1",worker_id="a"} 4.0
vllm:num_requests_waiting{engine="0"} 2
vllm:num_requests_waiting_by_reason{reason="capacity"} 99
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
dynamo_component_inflight_requests{dynamo_component="backend"} 7
"""


@pytest.mark.parametrize(
    ("metrics", "load"),
    [
        (METRICS, WorkerLoad(7, 2, 0.5)),
        (b"", None),
        (b"\xff\x00vllm:num_requests_running", None),
        (b"vllm:num_requests_running nan\nvllm:num_requests_waiting +Inf\n", None),
        (b"vllm:num_requests_running -4\nvllm:kv_cache_usage_perc 7\n", WorkerLoad(0, 0, 1.0)),
        (b'vllm:num_requests_running{a="} 1\n', None),
    ],
)
def test_loads(metrics: bytes, load: WorkerLoad | None) -> None:
    assert read_load(metrics) == load


class Server:
    """A system server that answers as it is set to."""

    def __init__(self) -> None:
        self.status, self.metrics, self.hangs = 200, METRICS, False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
                if self.hangs:
                    await asyncio.sleep(600)
                status, body = (self.status, b"{}") if target == b"/health" else (200, self.metrics)
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


@asynccontextmanager
async def followed() -> AsyncIterator[tuple[Server, SystemServer]]:
    server = Server()
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    system = SystemServer(f"http://127.0.0.1:{port}", interval_s=0.01, timeout_s=0.1)
    task = asyncio.create_task(system.run())
    async with asyncio.timeout(30):
        try:
            yield server, system
        finally:
            task.cancel()
            await asyncio.wait([task])
            listener.close()


async def until(system: SystemServer, *, healthy: bool) -> None:
    await eventually(lambda: system.healthy == healthy)


async def test_health_and_load_are_followed() -> None:
    async with followed() as (server, system):
        assert system.healthy
        await eventually(lambda: system.load is not None)
        assert system.load == WorkerLoad(7, 2, 0.5)
        server.status = 503
        await until(system, healthy=False)
        server.status = 200
        await until(system, healthy=True)


async def test_one_that_hangs_is_unhealthy_until_it_answers() -> None:
    async with followed() as (server, system):
        server.hangs = True
        await until(system, healthy=False)
        server.hangs = False
        await until(system, healthy=True)


async def test_metrics_without_end_are_no_load() -> None:
    async with followed() as (server, system):
        await eventually(lambda: system.load is not None)
        server.metrics = b"x" * (SystemServer.max_bytes + 1)
        await eventually(lambda: system.load is None)
        assert system.healthy
