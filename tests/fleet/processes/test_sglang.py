"""SGLang's servers behind a spec. The servers here only take the flags, and answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.sglang import check_sglang, sglang_server
from kvferry.fleet.spec.fleet_spec import EngineSpec, fleet_from
from support.fake_sglang import make_package
from support.fleets import Fleet, use_state_in

NAME = "foreign"
SPEC = """
name = "foreign"
model = "kvferry/tiny-python"
mode = "pooling"
served_model_name = ["m"]
[engine]
kind = "sglang"
connector = ["nixl"]
args = ["--mem-fraction-static=0.3"]
[role.prefill]
count = 1
tensor_parallel_size = 2
[role.decode]
count = 1
[router]
port = 0
count = 1
disaggregate_from = "0"
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers write what they are told."""
    use_state_in(tmp_path, monkeypatch)
    packages, told = tmp_path / "packages", tmp_path / "told"
    packages.mkdir()
    told.mkdir()
    make_package(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("FAKE_SGLANG", str(told))
    yield told
    Fleet(tmp_path, NAME).delete()


def told(folder: Path, mode: str) -> list[list[dict[str, Any]]]:
    """Of each server of a mode: its flags, and the bodies of its completions."""
    return [[json.loads(line) for line in one.read_text().splitlines()] for one in sorted(folder.glob(f"{mode}-*"))]


@pytest.mark.processes
def test_p_and_d_are_started_for_their_phases_meet_in_a_room_and_are_drained(tmp_path: Path, seen: Path) -> None:
    fleet = Fleet(tmp_path, NAME)
    fleet.apply(SPEC)
    body = {"model": "m", "prompt": "Hello", "max_tokens": 4}
    answer = httpx.post(f"{fleet.status.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["text"] == "decode"
    ((prefill, *of_p),) = told(seen, "prefill")
    ((decode, *of_d),) = told(seen, "decode")
    assert (prefill["tp_size"], decode["tp_size"]) == (2, 1)
    assert {one["disaggregation_transfer_backend"] for one in (prefill, decode)} == {"nixl"}
    room = of_d[0]["bootstrap_room"]
    assert [one["bootstrap_room"] for one in of_p] == [room]
    assert of_d[0]["bootstrap_port"] == of_p[0]["bootstrap_port"] == prefill["disaggregation_bootstrap_port"]
    fleet.scale("decode=2")
    fleet.scale("decode=1")
    assert len(fleet.names("decode")) == 1
    assert len(told(seen, "decode")) == 2


SWITCHING = (
    SPEC.replace("count = 1\ntensor_parallel_size = 2", 'count = 2\nmax = 2\ncan_be = ["decode"]')
    .replace("[role.decode]\ncount = 1", '[role.decode]\ncount = 1\nmax = 2\ncan_be = ["prefill"]')
    .replace('"--mem', '"--kv-events-config={\\"endpoint\\": \\"tcp://127.0.0.1:*\\"}", "--mem')
)


@pytest.mark.processes
def test_a_server_changes_its_role_when_it_is_idle_and_without_a_restart(tmp_path: Path, seen: Path) -> None:
    fleet = Fleet(tmp_path, NAME)
    fleet.apply(SWITCHING)
    pids = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
    fleet.scale("prefill=1", "decode=2")
    assert len(fleet.names("decode")) == 2
    assert {name: fleet.pid(name) for name in fleet.names("prefill", "decode")} == pids
    started = [flags for mode in ("prefill", "decode") for flags, *_ in told(seen, mode)]
    assert len({flags["disaggregation_bootstrap_port"] for flags in started} - {8998}) == 3
    assert len({flags["kv_events_config"] for flags in started}) == 3
    body = {"model": "m", "prompt": "Hello", "max_tokens": 4}
    texts = {httpx.post(f"{fleet.status.url}/v1/completions", json=body, timeout=60).status_code for _ in range(4)}
    assert texts == {200}
    switched = [body for bodies in told(seen, "prefill") for body in bodies if "new_role" in body]
    assert [body["new_role"] for body in switched] == ["decode"] * 2  # it was busy the first time

    fleet.scale("prefill=2", "decode=1")  # what has changed once is replaced
    left = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
    assert len(left) == 3
    assert len(left.items() & pids.items()) == 2
    switched = [body for bodies in told(seen, "prefill") for body in bodies if "new_role" in body]
    assert len(switched) == 2


@pytest.mark.processes
def test_a_server_that_does_not_change_its_role_is_replaced(
    tmp_path: Path, seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_SWITCHES", "broken")
    fleet = Fleet(tmp_path, NAME)
    fleet.apply(SWITCHING)
    pids = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
    fleet.scale("prefill=1", "decode=2")
    left = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
    assert len(left) == 3
    assert len(left.items() & pids.items()) == 2


TARGETS = {"ttft": "1s", "itl": "50ms", "budget": 4}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"engine": {"kind": "sglang", "connector": ["P2pConnector"]}}, "mooncake, mooncake_tcp or nixl"),
        ({"engine": {"kind": "sglang", "kv_transfer_config": "{}"}}, "mooncake, mooncake_tcp or nixl"),
        ({"role": {"prefill": {"can_be": ["both"]}, "decode": {}}}, "role.prefill.can_be: SGLang's servers change"),
        ({"backend": {"kind": "kubernetes", "kubernetes": {"image": "i"}}}, "no pods are written"),
        ({"scale": {**TARGETS, "aggregate": True}}, "compute no prompts"),
    ],
)
def test_what_would_not_work_is_refused(changes: dict[str, Any], complaint: str) -> None:
    base = {"name": "f", "model": "m", "mode": "pooling", "engine": {"kind": "sglang"}}
    with pytest.raises(ConfigError, match=complaint):
        fleet_from({**base, "role": {"prefill": {}, "decode": {}}, **changes})


def test_an_environment_without_sglang_and_flags_that_are_set_already_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no SGLang in the environment of"):
        check_sglang(EngineSpec(kind="sglang"), ())
    with pytest.raises(ConfigError, match="is not a file"):
        check_sglang(EngineSpec(kind="sglang", python="nowhere"), ())
    with pytest.raises(ConfigError, match="--port is set by kvferry"):
        check_sglang(EngineSpec(kind="sglang", python=sys.executable), ("--port=3",))


def test_an_instance_for_both_phases_is_not_disaggregated() -> None:
    made = sglang_server(
        "both-0",
        "both",
        EngineSpec(kind="sglang"),
        model="kvferry/tiny-python",
        served_name="m",
        host="127.0.0.1",
        port=0,
        num_ranks=1,
        switches=False,
        arguments=(),
        environment={},
        hidden=frozenset(),
    )
    assert not [one for one in made.command if "disaggregation" in one]
    assert made.bootstrap_port is None
