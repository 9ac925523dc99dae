"""A process that ends by itself or hangs is started again under its name; a crash loop ends what cannot answer."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from fleet.children import CRASHING_WHEN_TOLD, GOOD, HEALTHY, NEVER_SERVES, SILENT, child
from fleet.fleets import Make, attended, up
from fleet.recording import RecordingDisplay
from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.health_check import serves
from kvferry.fleet.processes.process import ProcessSpec
from kvferry.fleet.spec.fleet_spec import FailureSpec, MemberRole
from kvferry.fleet.spec.restart import RestartPolicy
from support.certificates import Authority
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("leaves_nobody")


@pytest.mark.parametrize(
    "wrong", [{"start_timeout_s": -1}, {"max_restarts": -1}, {"hang_timeout_s": -0.1}, {"hang_timeout_s": float("nan")}]
)
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must (not be negative|be a number|be above 0)"):
        RestartPolicy(**wrong)  # type: ignore[arg-type]


def good_prefill(name: str) -> ProcessSpec:
    return child(name, GOOD, "P", "http://p:1")


def healthy(name: str) -> ProcessSpec:
    return child(name, HEALTHY, "--port=0")


FLEET: dict[MemberRole, Make] = {"prefill": good_prefill, "decode": healthy, "router": healthy}


def pids(display: RecordingDisplay, name: str) -> list[int]:
    found = (re.fullmatch(r"pid (\d+)", text) for who, text in display.of("line") if who == name)
    return [int(match[1]) for match in found if match]


def urls(display: RecordingDisplay, name: str) -> list[str]:
    return [url for who, url in display.of("ready") if who == name]


async def end(task: asyncio.Task[int]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


@pytest.mark.parametrize("name", ["decode-0", "router-0"])
async def test_who_is_killed_comes_back_under_its_name(name: str) -> None:
    display = RecordingDisplay()
    task = await up(display, FLEET, FailureSpec(backoff=("100ms", "1s")))
    await display.until(lambda seen: bool(pids(seen, name)))
    for number in (2, 3):
        os.kill(pids(display, name)[-1], signal.SIGKILL)
        await display.until(lambda seen, n=number: len(urls(seen, name)) == len(pids(seen, name)) == n)  # type: ignore[misc]
    assert len(set(pids(display, name))) == 3
    assert await serves(urls(display, name)[-1])
    assert len(urls(display, "prefill-0")) == 1
    assert len(display.of("up")) == 1
    await end(task)
    assert not await serves(urls(display, name)[-1])


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_who_hangs_is_killed_and_comes_back(caplog: pytest.LogCaptureFixture, tmp_path: Path, tls: bool) -> None:
    caplog.set_level("DEBUG", "kvferry.fleet")
    display = RecordingDisplay()
    cert, key = Authority(tmp_path).issue()
    files = (str(cert), str(key)) if tls else ()
    makes = {**FLEET, "prefill": healthy, "decode": lambda name: child(name, HEALTHY, "--port=0", *files)}
    task = await up(display, makes, FailureSpec(hang="1s", backoff=("100ms", "1s")))
    async with asyncio.timeout(60):
        await eventually(lambda: "decode-0 answers GET /health" in caplog.text)
    os.kill(pids(display, "decode-0")[0], signal.SIGSTOP)
    await display.until(lambda seen: len(urls(seen, "decode-0")) == 2)
    assert "decode-0 has not answered GET /health for" in caplog.text
    assert len(pids(display, "router-0")) == 1
    await end(task)


async def test_who_hangs_as_soon_as_it_serves_is_killed_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    display = RecordingDisplay()
    makes = {**FLEET, "prefill": healthy, "decode": lambda name: child(name, SILENT)}
    task = await up(display, makes, FailureSpec(hang="400ms", backoff=("100ms", "1s")))
    await display.until(lambda seen: len(urls(seen, "decode-0")) == 2)
    assert "decode-0 has not answered GET /health for" in caplog.text
    await end(task)


async def test_who_does_not_serve_in_time_ends_everything_with_the_flag_that_gives_it_longer() -> None:
    display = RecordingDisplay()
    makes = {**FLEET, "decode": lambda name: child(name, NEVER_SERVES)}
    assert await attended(display, makes, FailureSpec(start="4s", crash_loop=1)).run() == 1
    told = next(text for (text,) in display.of("note") if text.startswith("error: "))
    assert "decode-0 does not serve after 4s (start in [failure], --start-timeout-s)" in told


async def test_a_crash_loop_ends_everything_by_name() -> None:
    display = RecordingDisplay()
    makes = {**FLEET, "decode": lambda name: child(name, CRASHING_WHEN_TOLD)}
    task = await up(display, makes, FailureSpec(crash_loop=4, backoff=("10ms", "50ms")))
    for number in range(1, 5):
        await display.until(lambda seen, n=number: len(pids(seen, "decode-0")) == n == len(urls(seen, "decode-0")))  # type: ignore[misc]
        os.kill(pids(display, "decode-0")[-1], signal.SIGUSR1)
    assert await task == 1
    told = next(text for (text,) in display.of("note") if text.startswith("error: "))
    assert told.startswith("error: decode-0 was killed by SIGABRT while running; decode: failed 4 times in a row")
    assert ["prefill-0", "told to end"] in display.of("line")


async def test_a_crash_loop_of_those_that_cannot_answer_ends_nothing() -> None:
    display = RecordingDisplay()
    makes = {**FLEET, "prefill": lambda name: child(name, CRASHING_WHEN_TOLD)}
    task = await up(display, makes, FailureSpec(crash_loop=1, backoff=("10ms", "50ms")))
    await display.until(lambda seen: bool(pids(seen, "prefill-0")))
    os.kill(pids(display, "prefill-0")[-1], signal.SIGUSR1)
    done, _ = await asyncio.wait([task], timeout=1.0)
    assert not done
    assert await serves(urls(display, "decode-0")[0])
    await end(task)


async def test_the_end_does_not_wait_for_a_restart() -> None:
    display = RecordingDisplay()
    task = await up(display, {"both": healthy}, FailureSpec(backoff=("1h", "1h")))
    await display.until(lambda seen: bool(pids(seen, "both-0")))
    os.kill(pids(display, "both-0")[0], signal.SIGKILL)
    async with asyncio.timeout(60):
        while await serves(urls(display, "both-0")[0]):
            await asyncio.sleep(0.01)
        await end(task)
