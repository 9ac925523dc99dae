"""`kvferry serve` with a real model: the whole product on one machine."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import ModelMaker
from kvferry.fleet.processes.vllm.ports import free_ports
from support.certificates import Authority
from support.processes import kvferry
from support.waiting import until

pytestmark = pytest.mark.processes

BODY = {"model": "tiny", "prompt": "The quick brown fox jumps over the lazy dog", "max_tokens": 12, "temperature": 0}


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvferry serve` once it is up, and its URL. What it says is in `log`."""
    command = [sys.executable, "-m", "kvferry.cli.main", "serve", *arguments, "--port", "0"]
    command += ["--served-model-name", "tiny", "--kv-cache-memory", "32MiB"]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("kvferry is up: "), log.read_text()
            yield process, line.removeprefix("kvferry is up: ").strip()
        finally:
            if process.poll() is None:
                process.terminate()


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + "/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "hand_off",
    [
        pytest.param("concurrent", marks=pytest.mark.full(in_every_part=True)),
        pytest.param("sequential", marks=pytest.mark.full),
    ],
)
def test_prefill_and_decode_say_what_one_instance_says(hand_off: str, tmp_path: Path, model_maker: ModelMaker) -> None:
    model = str(model_maker())
    flags = ("--served-model-name=tiny", "--kv-cache-memory=32MiB")
    with kvferry("serve", model, *flags, log=tmp_path / "one.log") as one:
        alone = post(one.url, BODY)["choices"][0]["text"]
    with serving(tmp_path / "two.log", model, "--prefill", "1", "--hand-off", hand_off) as (process, url):
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 3
        assert post(url, BODY)["choices"][0]["text"] == alone
        assert f'hand_offs_total{{kind="{hand_off}",reason=""}} 1.0' in get(url + "/metrics")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert psutil.wait_procs(started, timeout=10)[1] == []
    log = (tmp_path / "two.log").read_text()
    assert "[prefill-0] ready at http://127.0.0.1:" in log
    assert "[router-0] ready at " in log


def test_an_instance_that_is_killed_comes_back_while_the_others_answer(tmp_path: Path, model_maker: ModelMaker) -> None:
    """Where it was said to be, and all log as they were told."""
    log, first = tmp_path / "log", free_ports(1)[0]
    addresses = [f"http://127.0.0.1:{first + number}" for number in range(3)]
    more = ("--instance-ports", str(first), "--log-format", "json", "--log-level", "debug")
    with serving(log, str(model_maker()), "--prefill", "1", "--decode", "2", *more) as (process, url):
        before = post(url, BODY)["choices"][0]["text"]
        for address in addresses:
            assert "vllm:num_requests_running" in get(address + "/metrics")
        assert said_by(log, "decode-1", "ready at ") == [f"ready at {addresses[2]}"]
        serving_at(process.pid, first + 2).kill()
        for _ in range(4):
            assert post(url, BODY)["choices"][0]["text"] == before
        until(lambda: len(said_by(log, "decode-1", "ready at ")) == 2, 120, log.read_text())
        assert said_by(log, "decode-1", "ready at ") == [f"ready at {addresses[2]}"] * 2
        assert post(addresses[2], BODY)["choices"][0]["text"] == before
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert {"supervisor", "prefill-0", "decode-0", "decode-1", "router-0"} <= {line["instance"] for line in logged(log)}
    assert all({"time", "level", "message"} <= set(line) for line in logged(log))
    assert said_by(log, "supervisor", f"decode-0   {addresses[1]}")
    assert said_by(log, "supervisor", "decode-1 was killed by SIGKILL")


def serving_at(supervisor: int, port: int) -> psutil.Process:
    """The process of a fleet that listens there."""
    of_the_fleet = psutil.Process(supervisor).children(recursive=True)
    (found,) = [one for one in of_the_fleet if any(at.laddr.port == port for at in one.net_connections("tcp"))]
    return found


def logged(log: Path) -> list[dict[str, Any]]:
    """The lines of JSON that are whole so far."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def said_by(log: Path, instance: str, beginning: str) -> list[str]:
    messages = [line["message"] for line in logged(log) if line["instance"] == instance]
    return [message for message in messages if message.startswith(beginning)]


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "serve", str(tmp_path / "nowhere"), "--prefill", "1"]
    done = subprocess.run(
        [*command, "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nowhere" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_tls_towards_clients_and_between_instances(model_maker: ModelMaker, tmp_path: Path) -> None:
    """Towards clients, and where instances take KV from each other; the supervisor asks its router without."""
    log, authority = tmp_path / "log", Authority(tmp_path / "authority")
    cert, key = authority.issue()
    context = ssl.create_default_context(cafile=str(authority.ca))
    extra = {"transport": "tcp", **authority.options(*authority.issue("instance"))}
    transfer = {"kv_connector": "P2pConnector", "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
    with serving(
        log,
        str(model_maker("llama")),
        *("--prefill=1", "--tls-cert", str(cert), "--tls-key", str(key), "--hang-timeout-s=20", "--log-level=debug"),
        f"--kv-transfer-config={json.dumps(transfer)}",
    ) as (process, url):
        assert url.startswith("https://")
        request = urllib.request.Request(
            url + "/v1/completions", data=json.dumps(BODY).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60, context=context) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 12
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            get(url + "/health")
        with pytest.raises(OSError):
            get(url.replace("https:", "http:") + "/health")
        until(lambda: "router-0 answers GET /health" in log.read_text(), 60, log.read_text())
        process.terminate()
        assert process.wait(30) == 0
    assert "is read over tcp" in log.read_text()


def test_tls_files_are_looked_at_before_anything_is_started(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.pem"
    for command in (("serve",), ("serve", "--prefill=1"), ("prefill",), ("router", "--decode-url=http://127.0.0.1:9")):
        model = () if command[0] == "router" else ("kvferry/tiny-python",)
        program = [sys.executable, "-m", "kvferry.cli.main", command[0], *model, *command[1:], "--port=0"]
        done = subprocess.run([*program, f"--tls-cert={missing}"], check=False, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert f"--tls-cert {missing}: No such file or directory" in done.stderr
        assert "loading" not in done.stderr
