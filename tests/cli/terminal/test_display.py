"""The start of a serving command, as a person or a script sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.router_address import reachable_url
from kvferry.cli.terminal.display import LogFile, QuietDisplay, open_log
from kvferry.cli.terminal.summary import ServeSummary, ready_lines
from support.terminal import on_terminal
from support.waiting import until


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "serve.log")


def test_one_line_an_instance_and_one_block(log: LogFile, capsys: pytest.CaptureFixture[str]) -> None:
    display = QuietDisplay(ServeSummary(command="serve", title="m · 1 P + 1 D", models=("m",)), log)
    display.starting(["prefill-0", "decode-0"])
    display.progress("prefill-0", "loading weights", 0.4)
    display.line("prefill-0", "2026-01-31 12:00:00.123 INFO kvferry.engine: a detail")
    display.ready("prefill-0", "http://127.0.0.1:1")
    display.ready("decode-0", "http://127.0.0.1:2")
    display.up("http://127.0.0.1:8000")
    display.stopping("SIGINT: stopping everything")
    display.close()
    out, err = capsys.readouterr()
    assert out == "kvferry is up: http://127.0.0.1:8000\n"
    lines = err.splitlines()
    assert lines[0] == "m · 1 P + 1 D"
    assert re.fullmatch(r"✓ prefill-0  http://127.0.0.1:1 +[\d.]+ s", lines[1])
    assert lines[3:] == [
        "  page    http://127.0.0.1:8000   (fleet, requests, chat)",
        "  OpenAI  http://127.0.0.1:8000/v1   model: m",
        "  watch   kvferry top http://127.0.0.1:8000",
        f"  log     {log.path}",
        "Ctrl-C ends everything.",
        "Stopping everything",
    ]
    assert "a detail" in log.path.read_text()
    assert log.path.stat().st_mode & 0o077 == 0


def test_each_kind_of_warning_is_shown_once(log: LogFile, capsys: pytest.CaptureFixture[str]) -> None:
    display = QuietDisplay(ServeSummary(command="serve"), log)
    for number in range(5):
        for name in ("prefill-0", "decode-0"):
            display.line(name, f"2026-01-31 12:00:00.123 WARNING kvferry.core.compiled: no compiler for {number}")
    display.close()
    assert capsys.readouterr().err == "! prefill-0: no compiler for 0\n"
    assert log.path.read_text().count("no compiler") == 10


def test_a_slow_start_shows_progress_where_nothing_is_redrawn(log: LogFile, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    display = QuietDisplay(ServeSummary(command="serve"), log, clock)
    display.starting(["prefill-0"])
    for second in range(1, 13):
        clock.now = float(second)
        display.progress("prefill-0", "loading weights", second / 20)
    display.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["· prefill-0  loading weights (30%)", "· prefill-0  loading weights (60%)"]


def test_a_wildcard_address_can_be_opened_and_says_who_else_can() -> None:
    assert reachable_url("http://0.0.0.0:8000") == "http://127.0.0.1:8000"
    assert reachable_url("https://[::]:8000") == "https://[::1]:8000"
    lines = list(ready_lines("http://0.0.0.0:8000", ServeSummary(command="serve"), None))
    assert "0.0.0.0" not in "\n".join(lines)
    assert any("Anyone who reaches this machine can use the model: --api-key" in line for line in lines)
    locked = ServeSummary(command="serve", has_keys=True)
    assert not any("Anyone" in line for line in ready_lines("http://0.0.0.0:8000", locked, None))
    assert all(len(line) <= 80 for line in lines)


def test_no_file_where_none_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(taken))
    assert open_log("serve", 8000) is None


def test_a_log_file_that_is_a_link_is_not_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "serve-8000.log").symlink_to(victim)
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path))
    assert open_log("serve", 8000) is None


@pytest.mark.processes
def test_serve_without_counts_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    """One P and one D where there are two cores; the line at the end changes, and Ctrl-C ends all."""
    environment = {**os.environ, "KVFERRY_STATE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("KVFERRY_VERBOSE", None)
    command = [sys.executable, "-m", "kvferry.cli.main", "serve", "kvferry/tiny-python", "--port=0"]
    command += ["--kv-cache-memory=32MiB", *(() if len(os.sched_getaffinity(0)) > 1 else ("--prefill=1",))]
    with on_terminal(command, environment) as terminal:
        until(lambda: " running · " in terminal.text, 120, lambda: terminal.text)
        screen = terminal.text
        assert "kvferry/tiny-python · 1 P + 1 D" in screen
        assert screen.count("✓") == 3
        assert "INFO" not in screen
        terminal.interrupt()
        assert terminal.wait() == 0
    assert "Stopping everything" in terminal.text
    (log,) = (tmp_path / "logs").glob("serve-*.log")
    assert "[prefill-0] ready at http://127.0.0.1:" in log.read_text()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as piped:
        assert piped.stdout is not None
        assert piped.stdout.readline().startswith("kvferry is up: http://127.0.0.1:")
        piped.send_signal(signal.SIGINT)
        _, errors = piped.communicate(timeout=60)
    assert piped.returncode == 0
    assert "\x1b" not in errors
    assert all(len(line) <= 80 for line in errors.splitlines() if "logs/" not in line), errors
    assert any(line.startswith("Stopping everything") for line in errors.splitlines()[-3:]), errors


class ManualClock:
    """A clock that is set by hand."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now
