"""The server's beginning and its end in stages."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.request import EngineOutput
from kvferry.engine.server.config import ServerConfig

from .fake_engine import Gate, ScriptedEngine
from .running import running

TOKEN = EngineOutput(request_id="r", token_ids=[70])
LAST = EngineOutput(request_id="r", token_ids=[70], finish_reason="length")
BODY = {"prompt": "a", "stream": True}


async def test_the_real_port_is_told(tokenizer: Any) -> None:
    async with running(ScriptedEngine(tokenizer)) as server, aiohttp.ClientSession() as client:
        assert not server.url.endswith(":0")
        async with client.get(f"{server.url}/health") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "settings", [{"port": 70000}, {"max_choices": 0}, {"shutdown_grace_s": -1.0}, {"admin_port": -1}]
)
def test_settings_out_of_range(settings: Any) -> None:
    with pytest.raises(ConfigError, match="must"):
        ServerConfig(**settings)


async def test_a_running_request_may_end_within_the_grace_period(tokenizer: Any) -> None:
    gate = Gate()
    engine = ScriptedEngine(tokenizer, [TOKEN, gate, LAST])
    async with running(engine, shutdown_grace_s=60.0) as server, aiohttp.ClientSession(server.url) as client:
        response = await client.post("/v1/completions", json=BODY)
        await gate.reached.wait()
        server.server.stop()
        await until_refused(client)
        gate.opened.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert engine.aborted == []


@pytest.mark.parametrize("stream", [True, False])
async def test_after_the_grace_period_a_request_is_told_why_it_ends(tokenizer: Any, stream: bool) -> None:
    gate = Gate()
    engine = ScriptedEngine(tokenizer, [TOKEN, gate])
    async with running(engine, shutdown_grace_s=0.0) as server, aiohttp.ClientSession(server.url) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await gate.reached.wait()
        server.server.stop()
        response = await asking
        text = (await response.read()).decode()
        if stream:
            *_, error, done, _ = text.split("\n\n")
            assert (response.status, done) == (200, "data: [DONE]")
            text = error.removeprefix("data: ")
        else:
            assert response.status == 503
        assert "shutting down" in json.loads(text)["error"]["message"]
    assert len(engine.aborted) == 1


async def test_aborting_needs_no_patience(tokenizer: Any) -> None:
    gate = Gate()
    engine = ScriptedEngine(tokenizer, [TOKEN, gate])
    async with running(engine, shutdown_grace_s=600.0) as server, aiohttp.ClientSession(server.url) as client:
        response = await client.post("/v1/completions", json=BODY)
        await gate.reached.wait()
        server.server.abort()
        assert b"shutting down" in await response.read()


async def test_while_draining_a_connection_brings_no_further_request(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, [LAST])
    async with running(engine) as server, aiohttp.ClientSession(server.url) as client:
        for path, request in (("/v1/completions", client.post), ("/health", client.get)):
            server.context.lifecycle.draining = False
            async with client.get("/health") as response:
                assert response.status == 200
            server.context.lifecycle.drain()
            async with request(path, **({"json": BODY} if "v1" in path else {})) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "unavailable"
        assert engine.requests == []


async def until_refused(client: aiohttp.ClientSession) -> None:
    """Ask for health until no connection is accepted any more."""
    while True:
        try:
            async with client.get("/health"):
                pass
        except aiohttp.ClientConnectionError:
            return


PROGRAM = """
import asyncio, sys
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.app import serve
sys.path.insert(0, {folder!r})
from tests.engine.server.conftest import make_tokenizer
from tests.engine.server.fake_engine import DeterministicEngine

async def main():
    front = DeterministicEngine(make_tokenizer())
    await serve(front, ServerConfig(port=0), on_listening=lambda host, port: print(port, flush=True))
    print("the engine is closed now", flush=True)

asyncio.run(main())
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_returns_to_the_caller(number: int) -> None:
    program = PROGRAM.format(folder=str(Path(__file__).parents[3]))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        process.send_signal(number)
        assert process.stdout.readline() == "the engine is closed now\n"
        assert process.wait(30) == 0
