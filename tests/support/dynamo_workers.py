"""Dynamo's own workers for tests, found through files of a folder: mockers, and vLLM's on CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.models.catalog import resolve
from support.ports import free_port
from support.processes import AUTH_TOKEN, KvferryProcess, begun, kvferry
from support.sglang_servers import Case
from support.waiting import until

PYTHON = Path(__file__).parents[2] / os.environ.get("VENV_DYNAMO", ".venv-vllm") / "bin" / "python"
IS_INSTALLED = (PYTHON.parent.parent / ".kvferry-dynamo-installed").is_file()
MODEL = str(resolve("kvferry/tiny-python"))
START_S = 420.0
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
KVFERRY = {"kv_connector": "KvferryP2pConnector", "kv_role": "kv_both"}
ON_CPU = (
    *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
    *("--kv-cache-memory-bytes", "67108864", "--block-size", "32"),
)


def environment(store: Path) -> dict[str, str]:
    """Everything listens on this machine, where Dynamo can be told so; no etcd, no NATS."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        **dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"), "127.0.0.1"),
        **vllm_environment(),
    }


def vllm_environment() -> dict[str, str]:
    """How vLLM runs in a worker here, wherever it is found."""
    return {
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KVFERRY_STAND_INS": "torchvision torchaudio",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TLS": "tcp,sm,self",
        "UCX_NET_DEVICES": "lo",
    }


class Worker:
    """One process of Dynamo's, in a group of its own, as vLLM's has children."""

    def __init__(self, module: str, flags: Sequence[str], store: Path, log: Path, **more: str) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                (str(PYTHON), "-m", module, *flags),
                stdout=output,
                stderr=output,
                env={**os.environ, **environment(store), **more},
                start_new_session=True,
            )

    def strike(self, number: int) -> None:
        """Send a signal to the worker and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(timeout=30)

    def end(self) -> None:
        """End it as Dynamo's users do, or by force after half a minute."""
        self.strike(signal.SIGCONT)
        self.strike(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.strike(signal.SIGKILL)

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")


class Deployment:
    """Workers of Dynamo's, which begin to serve side by side."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        self.workers: list[Worker] = []

    @contextmanager
    def found_here(self) -> Iterator[None]:
        """Have processes that are started meanwhile look for workers among these."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(self.store).items():
                patch.setenv(name, value)
            yield

    @contextmanager
    def plain_vllm(self) -> Iterator[KvferryProcess]:
        """A vLLM server without Dynamo, by `kvferry serve --engine vllm`."""
        flags = ("--engine=vllm", f"--engine-python={PYTHON}", "--served-model-name=m")
        # The model's template takes texts; vLLM 0.32 guesses that it takes lists, and answers chats with a 400.
        template = "--chat-template-content-format=string"
        quiet = {name: environment(self.store)[name] for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS")}
        log = self.folder / "plain.log"
        with begun("serve", MODEL, *flags, "--", *ON_CPU, template, log=log, start_s=START_S, more=quiet) as ready:
            yield ready()

    def mocker(self, role: str, *flags: str, **more: str) -> Worker:
        """A worker that computes nothing: its tokens are drawn by chance, in the time that an engine would take."""
        ports = ("--bootstrap-ports", str(free_port())) if role == "prefill" else ()
        mode = (
            "--model-path",
            MODEL,
            "--model-name",
            "m",
            "--disaggregation-mode",
            role,
            "--speedup-ratio",
            "10",
            *ports,
        )
        return self._start("dynamo.mocker", (*mode, *flags), f"{role}-{len(self.workers)}", **more)

    def vllm(self, role: str, transfer: dict[str, Any] | None = None, *flags: str, **more: str) -> Worker:
        """A vLLM worker on a CPU. `transfer`: its `--kv-transfer-config`."""
        arguments = (
            "--model",
            MODEL,
            "--served-model-name",
            "m",
            *ON_CPU,
            "--kv-transfer-config",
            json.dumps(transfer or NIXL),
            *flags,
        )
        mode = () if role == "both" else ("--disaggregation-mode", role)
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        return self._start("dynamo.vllm", (*mode, *arguments), f"{role}-{len(self.workers)}", **port, **more)

    def engine(self, role: str, component: str, port: int) -> Worker:
        """An instance of kvferry's, as a worker of Dynamo's too."""
        flags = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB", f"--port={port}", "--grace-s=3")
        where = f"--register=dynamo://dynamo/{component}"
        return self._start("kvferry.cli.main", (role, MODEL, *flags, where), role, KVFERRY_AUTH_TOKEN=AUTH_TOKEN)

    def frontend(self, port: int) -> Worker:
        """Dynamo's own."""
        return self._start("dynamo.frontend", ("--http-host", "127.0.0.1", "--http-port", str(port)), "frontend")

    def _start(self, module: str, flags: Sequence[str], name: str, **more: str) -> Worker:
        worker = Worker(module, flags, self.store, self.folder / f"{name}.log", **more)
        self.workers.append(worker)
        return worker

    @contextmanager
    def router(self, *flags: str, log: str = "router.log", ends_cleanly: bool = True) -> Iterator[KvferryProcess]:
        """A router in front of the workers of prefill and decode."""
        urls = ("--prefill-url=dynamo://dynamo/prefill", "--decode-url=dynamo://dynamo/backend")
        with kvferry(
            "router",
            *urls,
            f"--dynamo-python={PYTHON}",
            *flags,
            log=self.folder / log,
            ends_cleanly=ends_cleanly,
        ) as process:
            yield process

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()


@dataclass
class Served:
    """Workers behind a router."""

    deployment: Deployment
    router: KvferryProcess


def instances(router: KvferryProcess, role: str | None = None) -> list[dict[str, Any]]:
    """The router's instances that are alive."""
    found: list[dict[str, Any]] = router.get("/kvferry/instances").json()["instances"]
    return [one for one in found if one["alive"] and not one["draining"] and role in (None, one["role"])]


def until_serving(router: KvferryProcess, prefill: int, decode: int, timeout_s: float = START_S) -> None:
    """Wait until the router has so many workers of each role."""
    counts = (prefill, decode)
    until(
        lambda: tuple(len(instances(router, role)) for role in ("prefill", "decode")) == counts,
        timeout_s,
        lambda: router.log,
    )


def shown(answer: Any) -> Any:
    """What a client reads in an answer of `support.sglang_servers.answers`, of kvferry's server and of vLLM's alike."""
    if not isinstance(answer, dict) or "choices" not in answer:
        return answer
    return {"choices": [_choice(one) for one in answer["choices"]], "usage": answer["usage"]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice.get("logprobs") or {}
    numbers = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or ()]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer = choice.get("token_ids") or text
    return {"answer": answer, "finish_reason": choice["finish_reason"], "logprobs": numbers}


def by_tokens(case: Case) -> Case:
    """A request with a prompt of token ids, answered with token ids: vLLM's text begins with the prompt where that ends
    within a character."""
    prompt = case.body.get("prompt")
    if not isinstance(prompt, list) or not isinstance(prompt[0], int):
        return case
    return Case(case.path, {**case.body, "return_token_ids": True})
