"""A fleet's file: read as it is written, or refused in one line that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.spec.fleet_spec import fleet_from, read_fleet, seconds

BASE: dict[str, Any] = {"name": "chat", "model": "m", "mode": "pooling", "role": {"prefill": {}, "decode": {}}}
UNIT: dict[str, Any] = {**BASE, "mode": "replica", "role": {}, "unit": {"members": {"prefill": 1, "decode": 2}}}


def in_pods(**kubernetes: Any) -> dict[str, Any]:
    return {**BASE, "backend": {"kind": "kubernetes", "kubernetes": kubernetes}}


def on_ray(**actors: Any) -> dict[str, Any]:
    return {**BASE, "backend": {"kind": "ray", "address": "10.0.0.1:6379", "ray": actors}}


TEXT = """
name = "chat"; model = "Qwen/Qwen3-8B"; mode = "pooling"
[engine]
kind = "vllm"
connector = ["P2pConnector", "KVStoreConnector"]
args = ["--dtype", "bfloat16"]
[role.prefill]
count = 2
max = 6
can_be = ["decode"]
[role.decode]
count = 3
[failure]
backoff = ["500ms", "2m"]
""".replace("; ", "\n")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(TEXT)
    fleet = read_fleet(path)
    assert (fleet.engine.kind, fleet.engine.connector) == ("vllm", ("P2pConnector", "KVStoreConnector"))
    assert (fleet.role["prefill"].count, fleet.role["prefill"].can_be, fleet.role["decode"].max) == (
        2,
        ("decode",),
        None,
    )
    assert [seconds(one) for one in fleet.failure.backoff] == [0.5, 120.0]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({**BASE, "modle": 1}, "modle is not a known key; did you mean 'mode'"),
        ({**BASE, "mode": "pool"}, "mode: .*pool"),
        ({**BASE, "name": "My Fleet"}, "name: .*lower-case"),
        ({"model": "m", "mode": "pooling"}, "name is required"),
        ({**BASE, "role": {"prefil": {}}}, "role.prefil is not a known key; did you mean 'prefill'"),
        ({**BASE, "role": {"prefill": {"cuont": 2}, "decode": {}}}, "role.prefill.cuont .*did you mean 'count'"),
        ({**BASE, "role": {"prefill": {"count": -1}, "decode": {}}}, "role.prefill.count: must be 0 to 4096, got -1"),
        ({**BASE, "role": {"prefill": {"count": 10**9}, "decode": {}}}, "role.prefill.count: must be 0 to 4096"),
        (in_pods(image="i", controllers=10**9), "backend.kubernetes.controllers: must be 1 to 8"),
        ({**BASE, "role": {"prefill": {"count": "two"}, "decode": {}}}, "role.prefill.count"),
        ({**BASE, "role": {"prefill": {}}}, "there are prefill instances, and none for decode"),
        ({**BASE, "role": {}}, "there is no role"),
        ({**BASE, "role": 3}, "role must be a table"),
        ({**BASE, "role": {"prefill": {"count": 3, "max": 2}, "decode": {}}}, "count = 3 is not between"),
        ({**BASE, "role": {"prefill": {"count": 1, "min": 2}, "decode": {}}}, "count = 1 is less than min = 2"),
        ({**BASE, "role": {"prefill": {"can_be": ["prefill"]}, "decode": {}}}, "names the role itself"),
        ({**BASE, "unit": {"members": {"both": 1}}}, "in pooling mode, roles have counts"),
        ({**UNIT, "unit": {"members": {}}}, "names no role"),
        ({**UNIT, "unit": {}}, "unit.members is required"),
        ({**BASE, "mode": "replica"}, r"needs a table \[unit\]"),
        ({**UNIT, "unit": {"members": {"both": 1}, "count": 3, "max": 1}}, "count = 3 is more than max = 1"),
        ({**BASE, "roll": {"surge": 0}}, "nothing could ever be replaced"),
        (
            {**BASE, "role": {"prefill": {"count": 2, "min": 2}, "decode": {}}, "roll": {"surge": 0, "unavailable": 1}},
            "role.prefill: with min = 2 and no room",
        ),
        ({**BASE, "failure": {"drain": "2 minutes"}}, "failure.drain: .*duration"),
        ({**BASE, "failure": {"backoff": ["2m", "1s"]}}, "longer than the longest"),
        ({**BASE, "failure": {"start": "0s"}}, "failure.start must be more than 0"),
        ({**BASE, "backend": {"kind": "loacl"}}, "unknown backend.kind 'loacl'; did you mean 'local'"),
        ({**BASE, "backend": {"kind": 3}}, "backend.kind: "),
        ({**BASE, "backend": {"options": {"a": 1}}}, "backend.options are for backends of other packages"),
        ({**BASE, "backend": {"kind": "kubernetes"}}, "need each other"),
        ({**BASE, "backend": {"kubernetes": {"image": "i"}}}, "need each other"),
        ({**BASE, "backend": {"address": "10.0.0.1:6379"}}, 'backend.address is for kind = "ray", not for local'),
        ({**BASE, "backend": {"ray": {}}}, 'backend.ray is for kind = "ray", not for local'),
        (on_ray(prefil={}), "backend.ray.prefil is not a known key; did you mean 'prefill'"),
        (on_ray(prefill={"cpu": 1}), "backend.ray.prefill.cpu is not a known key; did you mean 'cpus'"),
        (on_ray(prefill={"gpus": -1}), "backend.ray.prefill.gpus: must be 0 to"),
        (on_ray(prefill=3), "backend.ray.prefill must be a table"),
        (in_pods(imgae="i"), "backend.kubernetes.imgae is not a known key; did you mean 'image'"),
        (in_pods(), "backend.kubernetes.image is required"),
        (in_pods(image="i", pod=3), "backend.kubernetes.pod must be a table"),
        (in_pods(image="i", pod={"prefil": {}}), "pod.prefil is not a known key; did you mean 'prefill'"),
        (in_pods(image="i", pod={"decode": 3}), "pod.decode must be a table"),
        (in_pods(image="i", pod={"decode": {"host": 2}}), "pod.decode.host is not a known key; did you mean 'hosts'"),
        (in_pods(image="i", pod={"decode": {"limits": {"cpu": "two"}}}), "pod.decode.limits: "),
        ({**BASE, "engine": {"kind": "vlm"}}, "engine.kind: .*vlm"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        fleet_from(given)
    assert "\n" not in str(raised.value)


def test_what_pods_need() -> None:
    pods = {"decode": {"hosts": 2, "limits": {"nvidia.com/gpu": "8"}, "tolerations": [{"operator": "Exists"}]}}
    told = fleet_from(in_pods(image="kvferry:1", namespace="llm", pod=pods)).backend.kubernetes
    assert told is not None
    assert (told.image, told.namespace, told.gang, told.model_claim) == ("kvferry:1", "llm", "none", None)
    assert (told.pod["decode"].hosts, told.pod["decode"].limits) == (2, {"nvidia.com/gpu": "8"})
    assert told.pod["decode"].tolerations[0].operator == "Exists"


def test_what_actors_need() -> None:
    told = fleet_from(on_ray(decode={"cpus": 8, "gpus": 0.5, "resources": {"fast": 1}})).backend
    assert (told.kind, told.address) == ("ray", "10.0.0.1:6379")
    assert (told.ray["decode"].cpus, told.ray["decode"].gpus, told.ray["decode"].resources) == (8, 0.5, {"fast": 1})


@pytest.mark.parametrize("text", ["name = ", "\x00", "a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"chat\.toml is not valid TOML"):
        read_fleet(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_fleet(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({"name": "other"}, False),
        ({"roll": {"surge": 2}}, False),
        ({"role": {"prefill": {"count": 5}, "decode": {}}}, False),
        ({"role": {"prefill": {"args": ["--block-size=8"]}, "decode": {}}}, True),
        ({"role": {"prefill": {"tensor_parallel_size": 2}, "decode": {}}}, True),
        ({"model": "other"}, True),
        ({"engine": {"args": ["--dtype=bfloat16"]}}, True),
    ],
)
def test_only_what_instances_were_started_with_makes_a_revision(change: dict[str, Any], is_another: bool) -> None:
    assert (fleet_from({**BASE, **change}).revision != fleet_from(BASE).revision) is is_another


def test_what_an_actor_needs_is_part_of_the_revision() -> None:
    given = [{}, {"decode": {"cpus": 2}}, {"both": {"cpus": 2}}]
    plain, decode, other = (fleet_from({**BASE, "backend": {"kind": "ray", "ray": one}}) for one in given)
    assert plain.revision == other.revision != decode.revision
    assert plain.front(1).revision == decode.front(1).revision


def test_options_of_a_backend_of_one_s_own_are_part_of_the_revision() -> None:
    fleets = [
        fleet_from({**BASE, "backend": {"kind": "a.b:C", "options": options}}) for options in ({}, {"a": 1}, {"a": 2})
    ]
    assert len({one.revision for one in fleets}) == 3
    assert len({one.front(1).revision for one in fleets}) == 3


@pytest.mark.parametrize("flag", ["--api-key=k", "--admin_key=k", "--instance-api-key"])
@pytest.mark.parametrize("where", ["args", "router", "engine", "role"])
def test_a_key_is_not_written_into_a_spec(flag: str, where: str) -> None:
    told: dict[str, Any] = {"name": "chat", "model": "m", "mode": "pooling", "role": {"both": {}}}
    arguments = [flag] if "=" in flag else [flag, "k"]
    if where == "args":
        told["args"] = arguments
    elif where == "role":
        told["role"]["both"]["args"] = arguments
    else:
        told[where] = {"args": arguments}
    with pytest.raises(ConfigError, match=r"args: --(api|admin|instance-api)-key is a secret.*-key-file"):
        fleet_from(told)


@pytest.mark.parametrize("arguments", [["--api-key=k"], ["--api_key", "k"], ["--api-ke", "k"]])
@pytest.mark.parametrize("backend", ["local", "kubernetes"])
@pytest.mark.parametrize("where", ["engine", "role"])
def test_a_key_of_a_vllm_server_is_not_written_into_a_spec(arguments: list[str], backend: str, where: str) -> None:
    """Kubernetes' pods would have it on their command lines."""
    told: dict[str, Any] = {"name": "chat", "model": "m", "mode": "pooling", "role": {"both": {}}}
    told["engine"] = {"kind": "vllm"}
    (told["engine"] if where == "engine" else told["role"]["both"])["args"] = arguments
    if backend == "kubernetes":
        told["backend"] = {"kind": "kubernetes", "kubernetes": {"image": "i"}}
    with pytest.raises(ConfigError, match=r"args: --api-key is a secret.*VLLM_API_KEY.*pod\.ROLE\.secrets"):
        fleet_from(told)
    told["engine"]["args"], told["role"] = ["--api-server-count=1"], {"both": {}}
    fleet_from(told)


@pytest.mark.parametrize("key", ["kv_transfer_config", "args"])
def test_a_password_is_not_written_into_a_spec(key: str) -> None:
    url = '{"store": "valkey://:pw/with@10.0.0.1:6379"}'
    told = {"name": "chat", "model": "m", "mode": "pooling", "role": {"both": {}}}
    with pytest.raises(ConfigError, match=rf"engine.{key}: a URL has a password.*password_file"):
        fleet_from({**told, "engine": {key: url if key == "kv_transfer_config" else [f"--x={url}"]}})
    fleet_from({**told, "engine": {"kv_transfer_config": url.replace(":pw/with@", "")}})


def test_a_fleet_of_too_many_is_refused_at_once() -> None:
    told = {"name": "chat", "model": "m", "mode": "replica", "unit": {"members": {"both": 4096}, "count": 4096}}
    with pytest.raises(ConfigError, match="16777216 instances"):
        fleet_from(told)
