"""`--engine vllm` from the command line to the answer, with something that stands in for vLLM; `tests/end_to_end/vllm`
has the real one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from cli import fake_vllm
from support.processes import begun

pytestmark = pytest.mark.processes


@pytest.fixture
def python(tmp_path: Path) -> str:
    """What to name with --engine-python."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_vllm.__file__} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_serve(python: str, tmp_path: Path) -> None:
    flags = ["--engine", "vllm", "--engine-python", python, "--prefill", "2", "--port", "0"]
    command = [sys.executable, "-m", "kvferry.cli.main", "serve", "some/model", *flags, "--", "--dtype", "x y"]
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("kvferry is up: "), log.read_text()
            started = psutil.Process(process.pid).children(recursive=True)
            url = line.removeprefix("kvferry is up: ").strip()
            found = httpx.post(url + "/v1/completions", json={"model": "m", "prompt": "Hi"}, timeout=30).json()
            assert found["ticket_is_p_s"]
            assert found["arguments"][2:4] == ["serve", "some/model"]
            assert found["arguments"][-2:] == ["--dtype", "x y"]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
            assert psutil.wait_procs(started, timeout=10)[1] == []
        finally:
            process.terminate()  # also when something was not as it should be
    assert "[prefill-1] loading weights (50%)" in log.read_text()


@pytest.mark.parametrize(("command", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("serve", None)])
def test_one_alone(command: str, role: str | None, python: str, tmp_path: Path) -> None:
    flags = ("--engine=vllm", f"--engine-python={python}", "--served-model-name=m")
    with begun(command, "some/model", *flags, "--", "-O3", log=tmp_path / "log") as ready:
        server = ready()
        arguments = server.post("/v1/completions", {"prompt": "Hi"}).json()["arguments"]
        assert arguments[-1] == "-O3"
        assert ("--kv-transfer-config" in arguments) == (role is not None)
        assert role is None or role in arguments[arguments.index("--kv-transfer-config") + 1]
