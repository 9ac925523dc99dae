"""A process that ends by itself or hangs is started again at its address; a crash loop ends everything, by name."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from fleet.children import CRASHING_WHEN_TOLD, GOOD, HEALTHY, child
from fleet.recording import RecordingDisplay
from kvferry.core.errors import ConfigError
from kvferry.fleet import restart
from kvferry.fleet.asking import serves
from kvferry.fleet.process import ProcessSpec
from kvferry.fleet.ready import InstanceReady
from kvferry.fleet.restart import MOST_WAIT_S, SETTLED_S, Again, GiveUp, RestartPolicy, Restarts
from kvferry.fleet.supervisor import FleetPlan, LocalSupervisor, RouterGroup
from support.certificates import Authority


def waits(restarts: Restarts, count: int) -> list[float]:
    found = [restarts.failed(0.0) for _ in range(count)]
    assert all(isinstance(one, Again) for one in found)
    return [one.wait_s for one in found if isinstance(one, Again)]


def test_waits_double_up_to_a_bound_and_end() -> None:
    restarts = Restarts(RestartPolicy(max_restarts=8))
    assert waits(restarts, 8) == [0.5, 1, 2, 4, 8, 16, MOST_WAIT_S, MOST_WAIT_S]
    assert restarts.failed(0.0) == GiveUp(8)


def test_who_has_served_for_long_begins_anew() -> None:
    restarts = Restarts(RestartPolicy(max_restarts=2))
    assert waits(restarts, 2) == [0.5, 1]
    assert restarts.failed(SETTLED_S) == Again(0.5, 1)
    assert restarts.failed(SETTLED_S - 1) == Again(1, 2)
    assert restarts.failed(0.0) == GiveUp(2)


def test_nothing_is_started_again_where_that_is_said() -> None:
    assert Restarts(RestartPolicy(max_restarts=0)).failed(SETTLED_S) == GiveUp(0)


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"hang_timeout_s": -0.1}, {"hang_timeout_s": float("nan")}])
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must (not be negative|be a number)"):
        RestartPolicy(**wrong)  # type: ignore[arg-type]


def healthy(name: str) -> ProcessSpec:
    return child(name, HEALTHY, "--port=0")


def pids(display: RecordingDisplay, name: str) -> list[int]:
    found = (re.fullmatch(r"pid (\d+)", text) for who, text in display.of("line") if who == name)
    return [int(match[1]) for match in found if match]


def urls(display: RecordingDisplay, name: str) -> list[str]:
    return [url for who, url in display.of("ready") if who == name]


class OneRouter:
    """A front of one process, which opens its own port."""

    addresses = ()

    def processes(self, ready: Mapping[str, InstanceReady], group: RouterGroup) -> list[ProcessSpec]:
        return [healthy("router")]


async def up(display: RecordingDisplay, *specs: ProcessSpec, policy: RestartPolicy) -> asyncio.Task[int]:
    plan = FleetPlan(specs, OneRouter())
    task = asyncio.create_task(LocalSupervisor(display, policy=policy).run(plan))
    await display.until(lambda seen: bool(seen.of("up")))
    return task


@pytest.mark.parametrize("name", ["decode-0", "router"])
async def test_who_is_killed_comes_back_at_its_address(name: str) -> None:
    display = RecordingDisplay()
    task = await up(display, child("prefill-0", GOOD, "P", "http://p:1"), healthy("decode-0"), policy=RestartPolicy())
    for number in (1, 2):
        os.kill(pids(display, name)[-1], signal.SIGKILL)
        await display.until(lambda seen, number=number: len(urls(seen, name)) == number + 1)  # type: ignore[misc]
    assert len(set(urls(display, name))) == 1
    assert len(set(pids(display, name))) == 3
    assert await serves(urls(display, name)[0])
    assert len(urls(display, "prefill-0")) == 1
    assert len(display.of("up")) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert not await serves(urls(display, name)[0])


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_who_hangs_is_killed_and_comes_back(caplog: pytest.LogCaptureFixture, tmp_path: Path, tls: bool) -> None:
    caplog.set_level("DEBUG", "kvferry.fleet")
    display = RecordingDisplay()
    cert, key = Authority(tmp_path).issue()
    files = (str(cert), str(key)) if tls else ()
    spec = child("decode-0", HEALTHY, "--port=0", *files)
    task = await up(display, spec, policy=RestartPolicy(hang_timeout_s=1.0))
    await _is_asked(caplog)
    os.kill(pids(display, "decode-0")[0], signal.SIGSTOP)
    await display.until(lambda seen: len(urls(seen, "decode-0")) == 2)
    assert "decode-0 has not answered GET /health for" in caplog.text
    assert "decode-0 was killed by SIGKILL; starting it again in 0.5 s (restart 1 of 5 in a row)" in caplog.text
    assert len(pids(display, "router")) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def _is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Only who has answered once is judged."""
    async with asyncio.timeout(60):
        while "decode-0 answers GET /health" not in caplog.text:
            await asyncio.sleep(0.05)


async def test_who_never_answered_health_is_not_judged() -> None:
    """Such as a program whose health is elsewhere."""
    display = RecordingDisplay()
    policy = RestartPolicy(hang_timeout_s=0.1)
    task = await up(display, child("decode-0", GOOD, "D", "http://127.0.0.1:9"), policy=policy)
    await asyncio.sleep(1.0)  # ten times its limit
    assert len(urls(display, "decode-0")) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_a_crash_loop_ends_everything_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "FIRST_WAIT_S", 0.01)
    display = RecordingDisplay()
    task = await up(
        display,
        child("prefill-0", GOOD, "P", "http://p:1"),
        child("decode-0", CRASHING_WHEN_TOLD),
        policy=RestartPolicy(max_restarts=3),
    )
    for number in range(1, 5):
        await display.until(lambda seen, number=number: len(pids(seen, "decode-0")) == number)  # type: ignore[misc]
        os.kill(pids(display, "decode-0")[-1], signal.SIGUSR1)
    assert await task == 1
    assert ["error: decode-0 was killed by SIGABRT while running after 3 restarts in a row; its last lines:"] in (
        display.of("note")
    )
    assert ["prefill-0", "told to end"] in display.of("line")


async def test_the_end_does_not_wait_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "FIRST_WAIT_S", 3600.0)
    monkeypatch.setattr(restart, "MOST_WAIT_S", 3600.0)
    display = RecordingDisplay()
    task = await up(display, healthy("decode-0"), policy=RestartPolicy())
    os.kill(pids(display, "decode-0")[0], signal.SIGKILL)
    async with asyncio.timeout(60):
        while await serves(urls(display, "decode-0")[0]):
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await task == 0
