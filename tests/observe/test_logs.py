"""The one set-up of logging: both forms, names, requests, helpers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvferry.observe.logs import (
    INSTANCE_VARIABLE,
    LogConfig,
    helper_environment,
    json_line,
    name_request,
    set_up_logging,
)

LOG = logging.getLogger("kvferry.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_text_has_time_level_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogConfig())
    LOG.debug("not told")
    LOG.info("told %d", 1)
    name_request("r-1")
    LOG.warning("of a request")
    LOG.info("of another", extra={"request_id": "r-2"})
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    first, second, third = lines(capsys)
    assert re.fullmatch(stamp + " INFO kvferry.test: told 1", first)
    assert re.fullmatch(stamp + r" WARNING kvferry.test: of a request \[r-1\]", second)
    assert third.endswith("INFO kvferry.test: of another [r-2]")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTANCE_VARIABLE, "decode-0")
    set_up_logging(LogConfig(log_format="json", log_level="debug"), "decode")
    name_request("r-1")
    LOG.debug("a\nline")
    name_request("")
    try:
        raise ValueError("wrong")
    except ValueError:
        LOG.exception("failed")
    first, second = map(json.loads, lines(capsys))
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "debug",
        "instance": "decode-0",
        "logger": "kvferry.test",
        "request_id": "r-1",
        "message": "a\nline",
    }
    assert "ValueError: wrong" in second["exception"]
    assert "request_id" not in second


async def test_a_task_keeps_the_request_it_was_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogConfig())

    async def work() -> None:
        await asyncio.sleep(0)
        LOG.info("from a task")

    name_request("r-9")
    task = asyncio.create_task(work())
    name_request("")
    await task
    LOG.info("outside")
    inside, outside = lines(capsys)
    assert inside.endswith("from a task [r-9]")
    assert outside.endswith("outside")


@pytest.mark.parametrize("form", ["text", "json"])
def test_helpers_log_as_their_parent_does(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTANCE_VARIABLE, "prefill-0")
    set_up_logging(LogConfig(log_format=form))  # type: ignore[arg-type]
    program = (
        "import logging; from kvferry.observe.logs import follow_parent; follow_parent()\n"
        "logging.getLogger('kvferry.x').info('not told'); logging.getLogger('kvferry.x').warning('told')"
    )
    environment = {**os.environ, **helper_environment("rank-1"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60, env=environment
    )
    (line,) = done.stderr.splitlines()
    if form == "json":
        assert json.loads(line)["instance"] == "prefill-0 rank-1"
    else:
        assert line.endswith("WARNING rank-1 kvferry.x: told")


def test_others_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogConfig(log_level="debug"))
    logging.getLogger("httpx").info("GET …")
    logging.getLogger("httpx").warning("told")
    assert len(lines(capsys)) == 1


def test_a_line_of_another_program_as_json() -> None:
    found = json.loads(json_line("decode-0", 'with "quotes"', level="error"))
    assert (found["instance"], found["level"], found["message"]) == ("decode-0", "error", 'with "quotes"')
