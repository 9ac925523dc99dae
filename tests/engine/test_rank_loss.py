"""A rank that is gone ends the engine, with a name for what happened, soon; and nobody outlives rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import RankLost, Unavailable
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.executor.rank_options import RankOptions
from kvferry.engine.executor.rank_process import Process
from kvferry.engine.launch import AsyncEngine
from support import warm
from support.processes import is_running, kvferry
from support.waiting import until

pytestmark = pytest.mark.processes

START_S, SOON_S = 120.0, 15.0

PARENT = """
import time
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
engine = Engine(EngineConfig(model={model!r}, dtype="float32", device="cpu", kv_cache_memory="4MiB",
                             tensor_parallel_size=2))
print(*engine.executor.pids, flush=True)
time.sleep(600)
"""


def two_ranks(model: Path, ranks: RankOptions | None = None) -> Engine:
    return Engine(
        EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="4MiB", tensor_parallel_size=2),
        ranks=ranks,
    )


def pid_of(engine: Engine) -> int:
    [pid] = engine.executor.pids  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


def request(name: str, max_tokens: int = 2000) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)


def run_until_lost(engine: Engine) -> RankLost:
    """Step until it breaks."""
    engine.add(request("a"))
    try:
        while engine.has_work:
            engine.step()
    except RankLost as error:
        return error
    raise AssertionError("the engine did not break")


def bounded(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_killed_while_steps_run_is_named(model_maker: Any) -> None:
    engine = two_ranks(model_maker("llama"))
    pid = pid_of(engine)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    start = time.monotonic()
    error = run_until_lost(engine)
    assert time.monotonic() - start < SOON_S
    assert str(error) == f"rank 1 (process {pid}) was ended by SIGKILL"
    with pytest.raises(RankLost):
        engine.step()
    assert bounded(engine.close) < SOON_S


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_stands_still_is_not_waited_for_for_ever(model_maker: Any) -> None:
    engine = two_ranks(model_maker("llama"), RankOptions(step_s=1.0, answer_s=2.0, end_timeout_s=1.0))
    pid = pid_of(engine)
    os.kill(pid, signal.SIGSTOP)
    error = run_until_lost(engine)
    assert "did not take part in time" in str(error)
    assert bounded(engine.close) < SOON_S
    assert not is_running(pid)


@pytest.mark.usefixtures("warm_ranks")
async def test_a_rank_lost_while_nothing_runs_ends_the_engine_too(model_maker: Any) -> None:
    engine = AsyncEngine(two_ranks(model_maker("llama")), ["m"])
    engine.start()
    tokens = [token async for output in engine.generate(request("a", 5)) for token in output.token_ids]
    assert len(tokens) == 5  # its thread is another than the one that loaded
    os.kill(pid_of(engine.engine), signal.SIGKILL)
    await engine.failed()
    with pytest.raises(Unavailable, match=r"the engine failed: rank 1 .* SIGKILL"):
        await anext(engine.generate(request("b")))
    await engine.close()


@pytest.mark.usefixtures("warm_ranks")
async def test_a_rank_that_hangs_while_nothing_runs_ends_the_engine_too(model_maker: Any) -> None:
    engine = AsyncEngine(two_ranks(model_maker("llama"), RankOptions(ping_interval_s=0.5, end_timeout_s=1.0)), ["m"])
    engine.start()
    pid = pid_of(engine.engine)
    assert len([output async for output in engine.generate(request("a", 5))]) == 5
    assert engine.healthy
    os.kill(pid, signal.SIGSTOP)
    await engine.failed()
    assert not engine.healthy
    with pytest.raises(Unavailable, match=r"the engine failed: rank 1 .* hangs: it did not answer 6 pings"):
        await anext(engine.generate(request("b")))
    await engine.close()
    assert not is_running(pid)


def test_a_rank_lost_while_it_starts_is_named(model_maker: Any) -> None:
    def start_false(rank: int, pipe: int, auth_token: str) -> Process:
        return subprocess.Popen(["/bin/false"], pass_fds=(pipe,))

    start = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        two_ranks(model_maker("llama"), RankOptions(start_process=start_false))
    assert time.monotonic() - start < SOON_S
    two_ranks(model_maker("llama"), RankOptions(start_process=warm.run_rank)).close()


@pytest.mark.full(in_every_part=True)
def test_no_rank_outlives_rank_0(model_maker: Any, tmp_path: Path) -> None:
    parent = warm.Program(PARENT.format(model=str(model_maker("llama"))), tmp_path / "parent")
    try:
        until(lambda: parent.output.endswith("\n"), START_S)
        pid = int(parent.output)
    finally:
        parent.process.kill()
    until(lambda: not is_running(pid), SOON_S)


def test_an_instance_of_two_ranks_serves_and_ends_with_one_of_them(model_maker: Any, tmp_path: Path) -> None:
    flags = ("--tp=2", "--dtype=float32", "--kv-cache-memory=4MiB", "--served-model-name=m")
    with kvferry("serve", str(model_maker("llama")), *flags, log=tmp_path / "log", ends_cleanly=False) as instance:
        answer = instance.complete([1, 2, 3])
        assert len(answer["choices"][0]["token_ids"]) == 12
        instance.require_clean()
        [pid] = children_of(instance.pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: instance.returncode is not None, SOON_S, instance.log)
        assert instance.returncode == 1
        assert f"rank 1 (process {pid}) was ended by SIGKILL" in instance.log


def test_ctrl_c_ends_all_ranks(model_maker: Any, tmp_path: Path) -> None:
    flags = ("--tp=2", "--dtype=float32", "--kv-cache-memory=4MiB")
    with kvferry("serve", str(model_maker("llama")), *flags, log=tmp_path / "log") as instance:
        [pid] = children_of(instance.pid)
        os.kill(pid, signal.SIGINT)  # as the terminal does to all its processes
        instance.kill(signal.SIGINT)
        until(lambda: instance.returncode is not None and not is_running(pid), SOON_S, instance.log)
        assert instance.returncode == 0
        assert "Traceback" not in instance.log


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
