"""Calls into disks, libraries and code of others that never return: requests are answered without them, and a process
that is told to end does not wait for them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.endless import PLANTED
from support.processes import KvferryProcess, begun
from support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.short_deadlines]

FIRST, SECOND = list(range(7, 120)), list(range(200, 320))
ANSWER_S = 20.0
"""For an answer that takes a tenth of a second, on a machine that does much else."""
END_S = 25.0
"""`--grace-s` is for requests; then there are 15 s to close all, and 2 s to leave."""


@contextmanager
def instance(
    model: Path, folder: Path, store: str | list[str], connector: str = "KVStoreConnector", *more: str
) -> Iterator[KvferryProcess]:
    """One that keeps the blocks of its prompts in the store alone."""
    config = {"kv_connector": connector, "kv_connector_extra_config": {"store": store, "timeout_s": 300}}
    arguments = [str(model), "--served-model-name=m", "--dtype=float32", "--kv-cache-memory=4MiB", "--block-size=8"]
    arguments += [f"--kv-transfer-config={json.dumps(config)}", *more]
    planted = {PLANTED: str(folder / "planted")}
    with begun("decode", *arguments, log=folder / "log", ends_cleanly=False, more=planted) as ready:
        yield ready()


def answer(server: KvferryProcess, prompt: list[int]) -> list[int]:
    """What it says, without its own prefix cache's help."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWER_S)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def is_settled(server: KvferryProcess) -> bool:
    return server.metric("kvferry:connector_writer_waiting_bytes") == 0


def require_end(server: KvferryProcess) -> None:
    begun_at = time.monotonic()
    server.kill(signal.SIGTERM)
    until(lambda: server.returncode is not None, END_S, server.log)
    assert time.monotonic() - begun_at < END_S


STORES = {
    "match": "support.endless:EndlessStore",
    "get": "support.endless:EndlessStore",
    "put": "support.endless:EndlessStore",
    "close": "support.endless:EndlessStore",
    "encode": "file:{folder}/kv?codec=support.endless:EndlessCodec",
    "decode": "file:{folder}/kv?codec=support.endless:EndlessCodec",
    "access": "file:{folder}/kv?eviction=support.endless:EndlessPolicy&max_bytes=64MiB",
    "a FIFO": "file:{folder}/kv",
}


@pytest.mark.parametrize("planted", STORES)
def test_a_store(planted: str, model_maker: Any, tmp_path: Path) -> None:
    with instance(model_maker("llama"), tmp_path, STORES[planted].format(folder=tmp_path)) as server:
        first, second = answer(server, FIRST), answer(server, SECOND)
        until(lambda: is_settled(server), ANSWER_S, server.log)
        (tmp_path / "planted").write_text(planted)
        for path in tmp_path.glob("kv/*/*/*.kv") if planted == "a FIFO" else ():
            path.unlink()
            os.mkfifo(path)
        others = [list(range(start, start + 100)) for start in range(400, 1600, 100)]
        for prompt in others:  # more than the prefix cache holds
            answer(server, prompt)
        assert [answer(server, prompt) for prompt in (FIRST, SECOND, FIRST)] == [first, second, first]
        require_end(server)


@pytest.mark.parametrize("planted", ["step", "close the connector"])
def test_a_connector(planted: str, model_maker: Any, tmp_path: Path) -> None:
    """What it does within a step holds up the engine, but not the process's end."""
    with instance(
        model_maker("llama"), tmp_path, f"file:{tmp_path}/kv", "support.endless:CONNECTOR", "--grace-s=1"
    ) as server:
        answer(server, FIRST)
        (tmp_path / "planted").write_text(planted)
        if planted == "step":
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{server.url}/v1/completions", json={"prompt": SECOND, "max_tokens": 1}, timeout=0.5)
        require_end(server)
