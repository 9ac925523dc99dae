"""From what was said to the processes that run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.engine.config import EngineConfig
from kvferry.fleet.arguments import to_arguments, variable_name
from kvferry.fleet.local import LocalFleet
from kvferry.fleet.process import ProcessSpec
from kvferry.fleet.ready import InstanceReady
from kvferry.fleet.spec import FleetSpec, InstanceSpec, Listen
from kvferry.fleet.supervisor import RouterGroup
from kvferry.router.config import RouterConfig


def fleet(prefill: int = 1, decode: int = 1, transfer: str | None = None, **more: object) -> LocalFleet:
    return LocalFleet(
        spec=FleetSpec(prefill=prefill, decode=decode),
        engine=EngineConfig(model="m", block_size=16),
        instance=InstanceSpec(served_model_name=("a", "b"), kv_transfer_config=transfer),
        router=RouterConfig(hand_off="sequential"),
        listen=Listen(host="0.0.0.0", port=9000, grace_s=2.0),
        **more,  # type: ignore[arg-type]
    )


def transfer_of(spec: ProcessSpec) -> dict[str, object]:
    (flag,) = (one for one in spec.command if one.startswith("--kv-transfer-config="))
    return json.loads(flag.partition("=")[2])  # type: ignore[no-any-return]


def test_instances_are_on_loopback_with_ports_of_their_own_and_the_router_where_it_was_said(tmp_path: Path) -> None:
    plan = fleet(prefill=2).plan()
    assert [spec.name for spec in plan.instances] == ["prefill-0", "prefill-1", "decode-0"]
    for spec in plan.instances:
        assert spec.command[3:5] == (spec.name.split("-")[0], "m")
        assert {"--host=127.0.0.1", "--port=0", "--grace-s=2.0", "--block-size=16"} <= set(spec.command)
        assert [one for one in spec.command if "served" in one] == ["--served-model-name=a", "--served-model-name=b"]
    assert plan.front is not None
    (router,) = plan.front.processes(
        {spec.name: InstanceReady(f"http://{spec.name}:1") for spec in plan.instances}, RouterGroup(tmp_path, (7,))
    )
    assert router.descriptors == (7,)
    assert {"--host=0.0.0.0", "--port=9000", "--hand-off=sequential"} <= set(router.command)
    assert [one for one in router.command if "url" in one] == [
        "--prefill-url=http://prefill-0:1",
        "--prefill-url=http://prefill-1:1",
        "--decode-url=http://decode-0:1",
    ]


def test_the_secret_is_shared_and_not_an_argument() -> None:
    first, second = fleet().plan(), fleet().plan()
    tokens = {spec.environment["KVFERRY_AUTH_TOKEN"] for spec in first.instances}
    assert len(tokens) == 1
    assert tokens == {second.instances[0].environment["KVFERRY_AUTH_TOKEN"]}  # this user's, which `kvferry fleet` has
    assert not any(token in argument for token in tokens for spec in first.instances for argument in spec.command)


def test_a_secret_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "mine, and not too short")
    assert fleet().plan().instances[0].environment["KVFERRY_AUTH_TOKEN"] == "mine, and not too short"


@pytest.mark.parametrize(
    ("prefill", "decode", "numbers"), [(1, 0, (1, 1)), (0, 2, (1, 2)), (0, 0, (0, 0)), (3, 1, (3, 1))]
)
def test_one_of_the_other_when_only_one_is_said(prefill: int, decode: int, numbers: tuple[int, int]) -> None:
    spec = FleetSpec(prefill=prefill, decode=decode)
    assert (spec.num_prefill, spec.num_decode) == numbers
    assert spec.is_split == (numbers != (0, 0))


def test_connectors() -> None:
    plan = fleet().plan()
    assert [transfer_of(spec) for spec in plan.instances] == [
        {"kv_role": "kv_producer", "kv_connector": "P2pConnector"},
        {"kv_role": "kv_consumer", "kv_connector": "P2pConnector"},
    ]


def test_what_the_json_says_stays_but_for_what_must_differ() -> None:
    said = {"kv_connector": "P2pConnector", "kv_role": "kv_both", "kv_port": 14579, "engine_id": "e"}
    plan = fleet(transfer=json.dumps(said)).plan()
    assert [transfer_of(spec) for spec in plan.instances] == [
        {**said, "engine_id": "e-prefill-0"},
        {**said, "engine_id": "e-decode-0", "kv_port": 14580},
    ]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_cannot_be_that_of_all_instances(role: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot have kv_role {role}"):
        fleet(transfer=json.dumps({"kv_connector": "P2pConnector", "kv_role": role})).plan()


def test_what_must_differ_has_room_too() -> None:
    said = {"kv_connector": "P2pConnector", "engine_id": "e" * 250}
    with pytest.raises(ConfigError, match="engine_id must have 1 to 256 characters"):
        fleet(transfer=json.dumps(said)).plan()
    with pytest.raises(ConfigError, match="kv_port must be between"):
        fleet(transfer=json.dumps({**said, "engine_id": "e", "kv_port": 65535})).plan()


def test_errors_come_before_anything_is_started() -> None:
    with pytest.raises(UnknownName, match="P2pConnector"):
        fleet(transfer='{"kv_connector": "P2pConector"}').plan()
    with pytest.raises(ConfigError, match="kv_connector"):
        fleet(transfer='{"kv_conector": "P2pConnector"}').plan()
    with pytest.raises(ConfigError, match="--decode"):
        FleetSpec(decode=-1)
    with pytest.raises(ConfigError, match="--port"):
        Listen(port=70000)


def test_arguments_leave_out_what_was_not_said() -> None:
    arguments = to_arguments(EngineConfig(model="m", prefix_caching=False, seed=-1), without=("model",))
    assert "--no-prefix-caching" in arguments
    assert "--no-trust-remote-code" in arguments
    assert "--seed=-1" in arguments
    assert not any(one.startswith(("--model", "--num-threads")) for one in arguments)


def test_names_of_variables() -> None:
    assert variable_name("max_num_seqs") == "KVFERRY_MAX_NUM_SEQS"
