"""What is rendered for pods, run as processes of this machine: each has an address of its own, as a pod has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.fleet.backends.kubernetes.manifests.render import render
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.spec.fleet_spec import fleet_from
from support.ports import free_port
from support.processes import AUTH_TOKEN, KvferryProcess, begun
from support.waiting import until

TOLD: dict[str, Any] = {
    "name": "chat",
    "model": "kvferry/tiny-python",
    "mode": "pooling",
    "role": {"prefill": {}, "decode": {}},
    "failure": {"drain": "20s"},
    "backend": {"kind": "kubernetes", "kubernetes": {"image": "kvferry:0.1", "routers": 1}},
}


def containers() -> dict[str, Any]:
    """The container of each workload, by its name."""
    found = {}
    for one in render(fleet_from(TOLD), Values(), AUTH_TOKEN):
        if one["kind"] in ("Deployment", "StatefulSet"):
            (found[one["metadata"]["name"]],) = one["spec"]["template"]["spec"]["containers"]
    return found


def start(
    running: ExitStack, container: Any, address: str, log: Path, *, ends_cleanly: bool = True, **changed: str
) -> Callable[[], KvferryProcess]:
    """The container's command, at this address instead of a pod's and at any port instead of the pod's own."""
    said = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    environment = {name: value for name, value in said.items() if name.startswith("KVFERRY_")} | changed
    command = [*container["command"][1:], *container["args"]]
    command = [one.replace("$(POD_IP)", address).replace("0.0.0.0", address) for one in command if "--port" not in one]
    return running.enter_context(begun(*command, log=log, ends_cleanly=ends_cleanly, more=environment))


def probe(process: KvferryProcess, container: Any, name: str) -> bool:
    """Whether what Kubernetes would ask is answered well."""
    return httpx.get(process.url + container[f"{name}Probe"]["httpGet"]["path"], timeout=10).is_success


@pytest.mark.processes
def test_the_pods_of_a_fleet(tmp_path: Path) -> None:
    """They find each other, hand off, say by their probes how they are, and leave drained."""
    told = containers()
    with ExitStack() as running:
        router = start(running, told["chat-router"], "127.0.0.1", tmp_path / "router.log")()
        assert probe(router, told["chat-router"], "liveness")
        assert not probe(router, told["chat-router"], "readiness")
        places = {"chat-prefill": "127.0.0.2", "chat-decode": "127.0.0.3"}
        ready = {
            name: start(running, told[name], address, tmp_path / f"{name}.log", KVFERRY_REGISTER=router.url)
            for name, address in places.items()
        }
        instances = {name: one() for name, one in ready.items()}
        for name, instance in instances.items():
            assert all(probe(instance, told[name], which) for which in ("startup", "readiness", "liveness"))
        until(lambda: probe(router, told["chat-router"], "readiness"), 20, router.log)
        until(lambda: instances["chat-prefill"].url in listed(router), 20, router.log)
        assert router.complete("def add(a, b):")["usage"]["completion_tokens"] == 12
        assert instances["chat-prefill"].metric("vllm:prompt_tokens_total") > 0

        stops = told["chat-decode"]["lifecycle"]["preStop"]["exec"]["command"]
        script = stops[2].replace("http://chat-router-0.chat-routers:8000", router.url)
        script = script.replace("http://$POD_IP:8000", instances["chat-decode"].url)
        script = script.replace("kvferry fleet", f"{sys.executable} -m kvferry.cli.main fleet")
        done = subprocess.run(
            [*stops[:2], script],
            env={"KVFERRY_AUTH_TOKEN": AUTH_TOKEN},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "drained" in done.stdout
        assert router.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code in (200, 503)


@pytest.mark.processes
def test_the_pods_of_one_instance(tmp_path: Path) -> None:
    """Its ranks meet at its first pod, and all of them end with any of them."""
    # In bfloat16, a sum of two ranks rounds otherwise than one rank does, and they would not be paired.
    told = {
        **TOLD,
        "engine": {"args": ["--dtype=float32"]},
        "role": {"prefill": {}, "decode": {"tensor_parallel_size": 2}},
    }
    kubernetes = {**TOLD["backend"]["kubernetes"], "pod": {"decode": {"hosts": 2}}}
    fleet = fleet_from({**told, "backend": {"kind": "kubernetes", "kubernetes": kubernetes}})
    objects = {one["metadata"]["name"]: one["spec"] for one in render(fleet, Values(), AUTH_TOKEN) if "spec" in one}
    (prefill,) = objects["chat-prefill"]["template"]["spec"]["containers"]
    templates = objects["chat-decode"]["leaderWorkerTemplate"]
    first, second = (templates[f"{name}Template"]["spec"]["containers"][0] for name in ("leader", "worker"))
    assert second["command"] == ["kvferry", "rank", "$(LWS_LEADER_ADDRESS):7000"]
    port = free_port()
    first["args"] = [one.replace("7000", str(port)) for one in first["args"]]
    with ExitStack() as running:
        router = start(running, containers()["chat-router"], "127.0.0.1", tmp_path / "router.log")()
        registers = {"KVFERRY_REGISTER": router.url}
        ready = [
            start(
                running,
                container,
                f"127.0.0.{number}",
                tmp_path / f"{number}.log",
                ends_cleanly=number == 2,
                **registers,
            )
            for number, container in ((2, prefill), (3, first))
        ]
        rank = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli.main", "rank", f"127.0.0.3:{port}"],
            env={**os.environ, "KVFERRY_AUTH_TOKEN": AUTH_TOKEN, "OMP_NUM_THREADS": "1"},
        )
        try:
            prefilling, decoding = (one() for one in ready)
            until(lambda: {prefilling.url, decoding.url} <= {*listed(router).split()}, 20, router.log)
            assert router.complete("def add(a, b):")["usage"]["completion_tokens"] == 12
            assert prefilling.metric("vllm:prompt_tokens_total") > 0
        finally:
            rank.kill()
            rank.wait()
        until(lambda: decoding.returncode is not None, 30, decoding.log)
        assert decoding.returncode, "which its pod says"


def listed(router: KvferryProcess) -> str:
    """The router's instances, as its operator sees them."""
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", "fleet", "list", "--router", router.url],
        env={"KVFERRY_AUTH_TOKEN": AUTH_TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
