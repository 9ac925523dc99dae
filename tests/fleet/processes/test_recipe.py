"""From what was said to the processes that run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.keys import fleet_token
from kvferry.core.settings.model import encode
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.processes.process_settings import InstanceProcess, RouterProcess
from kvferry.fleet.processes.recipe import LocalRecipe
from kvferry.fleet.spec.fleet_settings import FleetSettings, failing, fleet_of
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, RoleSpec, ScaleSpec
from kvferry.fleet.spec.keys import SECRETS, TypedKeys
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.router.config import RouterConfig

TOKEN = "mine, and not too short"
FIXED = '{"kv_connector":"P2pConnector","kv_ip":"10.9.9.9"}'


def recipe(prefill: int = 1, decode: int = 1, transfer: str | None = None, **more: Any) -> LocalRecipe:
    told = FleetSettings(
        spec=FleetShapeSettings(prefill=prefill, decode=decode),
        engine=EngineConfig(model="m", block_size=16),
        instance=InstanceSettings(served_model_name=("a", "b"), kv_transfer_config=transfer),
        router=RouterConfig(hand_off="sequential"),
        listen=ListenSettings(host="0.0.0.0", port=9000, grace_s=2.0),
    )
    told = replace(told, **more)
    found = LocalRecipe(fleet=fleet_of("kvferry", told), settings=told, token=TOKEN)
    found.check()
    return found


def processes(made: LocalRecipe) -> list[ProcessSpec]:
    """Those of all instances, as the backend asks for them."""
    names: list[tuple[str, MemberRole]] = [
        (f"{role}-{index}", role) for role, one in made.fleet.role.items() for index in range(one.count)
    ]
    return [made.instance(name, role, number, made.cores) for number, (name, role) in enumerate(names)]


def settings_of(spec: ProcessSpec) -> InstanceProcess:
    assert isinstance(spec.settings, InstanceProcess)
    return spec.settings


def transfer_of(spec: ProcessSpec) -> dict[str, object]:
    return json.loads(settings_of(spec).instance.kv_transfer_config or "")  # type: ignore[no-any-return]


def test_instances_are_on_loopback_with_ports_of_their_own_and_the_router_where_it_was_said(tmp_path: Path) -> None:
    made = recipe(prefill=2)
    found = processes(made)
    assert [spec.name for spec in found] == ["prefill-0", "prefill-1", "decode-0"]
    for spec in found:
        assert spec.command[3:] == (spec.name.split("-")[0], "m")
        settings = settings_of(spec)
        assert settings.listen == ListenSettings(host="127.0.0.1", port=0, grace_s=2.0)
        assert settings.engine == EngineConfig(model="m", block_size=16)
        assert settings.instance.served_model_name == ("a", "b")
        assert spec.forks
    assert list(made.addresses) == [("0.0.0.0", 9000)]
    router = made.router_member("router-0", RouterGroup(tmp_path, (7,)))
    assert router.descriptors == (7,)
    assert isinstance(router.settings, RouterProcess)
    assert router.settings.listen == ListenSettings(host="0.0.0.0", port=9000, grace_s=2.0)
    assert (router.settings.router.hand_off, router.settings.listeners) == ("sequential", (7,))
    assert not router.settings.router.decode_url  # it is told later which instances there are


def test_a_first_port_gives_each_instance_one_of_its_own() -> None:
    made = recipe(prefill=2, spec=FleetShapeSettings(prefill=2, decode=1, instance_ports=9100))
    assert [settings_of(spec).listen.port for spec in processes(made)] == [9100, 9101, 9102]


def test_on_a_node_of_a_cluster_others_reach_an_instance_at_the_node_s_address() -> None:
    made = recipe(spec=FleetShapeSettings(prefill=1, decode=1, backend="ray")).on_node("10.0.0.3")
    for spec in processes(made):
        assert settings_of(spec).listen.host == "10.0.0.3"
        assert transfer_of(spec)["kv_ip"] == "10.0.0.3"
    (told,) = processes(
        replace(made, settings=replace(made.settings, instance=InstanceSettings(kv_transfer_config=FIXED)))
    )[:1]
    assert transfer_of(told)["kv_ip"] == "10.9.9.9"
    assert made.num_routers == 2


def test_an_instance_that_can_change_its_role_does_both() -> None:
    made = recipe()
    fleet = DesiredFleet(
        name="f",
        model="m",
        mode="pooling",
        role={"prefill": RoleSpec(can_be=("decode",)), "decode": RoleSpec(args=("--seed=5",))},
        keys=TypedKeys(role={"decode": {"dtype": "bfloat16"}}),
    )
    prefill, decode = processes(replace(made, fleet=fleet))
    assert prefill.command[3] == "serve"
    assert transfer_of(prefill)["kv_role"] == "kv_both"
    assert decode.command[3] == "decode"
    assert [(settings_of(spec).engine.seed, settings_of(spec).engine.dtype) for spec in (prefill, decode)] == [
        (None, "auto"),
        (5, "bfloat16"),
    ]


def test_the_secret_is_shared_and_not_an_argument(tmp_path: Path) -> None:
    made = recipe()
    router = made.router_member("router-0", RouterGroup(tmp_path, ()))
    for spec in (*processes(made), router):
        assert spec.environment["KVFERRY_AUTH_TOKEN"] == TOKEN
        assert not any(TOKEN in argument for argument in spec.command)
    assert TOKEN not in repr(made)


def test_a_secret_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", TOKEN)
    assert fleet_token() == TOKEN
    monkeypatch.delenv("KVFERRY_AUTH_TOKEN")
    assert fleet_token() == fleet_token() != TOKEN  # this user's, which `kvferry fleet` has


def test_a_router_of_a_fleet_is_told_its_instances_though_none_are_wanted_now(tmp_path: Path) -> None:
    made = recipe()
    none = {role: msgspec.structs.replace(one, count=0) for role, one in made.fleet.role.items()}
    made = replace(made, fleet=msgspec.structs.replace(made.fleet, role=none))
    settings = made.router_member("router-0", RouterGroup(tmp_path, ())).settings
    assert isinstance(settings, RouterProcess)
    assert settings.router.declared


def test_routers_are_as_many_as_there_are_cores_for() -> None:
    made = recipe()
    assert made.num_routers == (2 if len(made.cores) >= 4 else 1)
    assert recipe(router=RouterConfig(workers=3)).num_routers == 3


def test_operators_may_have_an_address_of_their_own() -> None:
    made = recipe(access=HttpAccess(admin_port=9001, admin_host="127.0.0.1"))
    assert list(made.addresses) == [("0.0.0.0", 9000), ("127.0.0.1", 9001)]


def test_restarts_are_the_failures_of_a_spec() -> None:
    found = failing(RestartPolicy(max_restarts=4, hang_timeout_s=2.5, start_timeout_s=3600))
    assert (found.crash_loop, found.hang, found.backoff[0], found.start) == (5, "2.5s", "500ms", "3600s")
    assert failing(RestartPolicy()).start == "600s"


@pytest.mark.parametrize(
    ("prefill", "decode", "numbers"),
    [(1, None, (1, 1)), (None, 2, (1, 2)), (None, None, (0, 0)), (0, 0, (0, 0)), (3, 1, (3, 1))],
)
def test_one_of_the_other_when_only_one_is_said(
    prefill: int | None, decode: int | None, numbers: tuple[int, int]
) -> None:
    spec = FleetShapeSettings(prefill=prefill, decode=decode)
    assert (spec.num_prefill, spec.num_decode) == numbers
    assert spec.is_split == (numbers != (0, 0))


def test_connectors() -> None:
    assert [transfer_of(spec) for spec in processes(recipe())] == [
        {"kv_role": "kv_producer", "kv_connector": "P2pConnector"},
        {"kv_role": "kv_consumer", "kv_connector": "P2pConnector"},
    ]


def test_what_the_json_says_stays_but_for_what_must_differ() -> None:
    said = {"kv_connector": "P2pConnector", "kv_role": "kv_both", "kv_port": 14579, "engine_id": "e"}
    assert [transfer_of(spec) for spec in processes(recipe(transfer=json.dumps(said)))] == [
        {**said, "engine_id": "e-prefill-0"},
        {**said, "engine_id": "e-decode-0", "kv_port": 14580},
    ]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_cannot_be_that_of_all_instances(role: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot have kv_role {role}"):
        processes(recipe(transfer=json.dumps({"kv_connector": "P2pConnector", "kv_role": role})))


def test_what_must_differ_has_room_too() -> None:
    said = {"kv_connector": "P2pConnector", "engine_id": "e" * 250}
    with pytest.raises(ConfigError, match="engine_id must have 1 to 256 characters"):
        processes(recipe(transfer=json.dumps(said)))
    with pytest.raises(ConfigError, match="kv_port must be between"):
        processes(recipe(transfer=json.dumps({**said, "engine_id": "e", "kv_port": 65535})))


def test_errors_come_before_anything_is_started() -> None:
    with pytest.raises(UnknownName, match="P2pConnector"):
        processes(recipe(transfer='{"kv_connector": "P2pConector"}'))
    with pytest.raises(ConfigError, match="kv_connector"):
        processes(recipe(transfer='{"kv_conector": "P2pConnector"}'))
    with pytest.raises(ConfigError, match="--decode"):
        FleetShapeSettings(decode=-1)
    with pytest.raises(ConfigError, match="--port"):
        ListenSettings(port=70000)


@pytest.mark.parametrize(("itself", "cache"), [(2**40, None), (2**20, "100TiB")])
def test_more_instances_than_the_machine_has_memory_for_are_refused(
    itself: int, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.fleet.processes.recipe.INSTANCE_BYTES", itself)
    settings, spec = (
        EngineConfig(model="m", kv_cache_memory=cache, device="cpu"),
        FleetShapeSettings(prefill=1, decode=64),
    )
    with pytest.raises(ConfigError, match=r"65 instances take at least .* each: this machine has"):
        recipe(spec=spec, engine=settings)
    recipe(spec=msgspec.structs.replace(spec, backend="ray"), engine=settings)


def test_no_secret_is_on_a_command_line(tmp_path: Path) -> None:
    """Which everyone on the machine can read: whatever is a key, the token, and passwords of stores."""
    said = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_extra_config": {"store": "valkey://:the-secret@127.0.0.1:6379"},
    }
    access = HttpAccess(api_key=("the-secret",), admin_key=("the-secret",))
    made = replace(
        recipe(transfer=json.dumps(said), access=access, instance_access=InstanceAccess(instance_api_key="the-secret")),
        token="the-secret of the deployment",
    )
    secrets = {
        name for config in (HttpAccess, InstanceAccess) for name in config.__struct_fields__ if name.endswith("_key")
    }
    assert secrets - {"tls_key"} == {*SECRETS}, "one that is passed on some other way"
    for spec in (*processes(made), made.router_member("router-0", RouterGroup(tmp_path, ()))):
        assert "the-secret" not in " ".join(spec.command)
        assert spec.settings is not None
        assert b"the-secret" in encode(spec.settings)
        assert "the-secret" not in repr(spec.settings) or spec.forks


@pytest.mark.parametrize(("flag", "target"), [(None, 0.05), (0.2, 0.2)])
def test_instances_of_a_fleet_with_targets_bound_their_steps_unless_a_flag_says_otherwise(
    flag: float | None, target: float
) -> None:
    made = recipe()
    made = replace(
        made,
        fleet=msgspec.structs.replace(made.fleet, scale=ScaleSpec(ttft="2s", itl="50ms")),
        settings=replace(made.settings, engine=msgspec.structs.replace(made.settings.engine, itl_target_s=flag)),
    )
    for spec in processes(made):
        assert settings_of(spec).engine.itl_target_s == target
    assert all(settings_of(spec).engine.itl_target_s is None for spec in processes(recipe()))


def test_each_instance_computes_on_gpus_of_its_own_and_sees_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvferry's engine takes the first GPUs that it sees; P's memory is read from D's process, which must see them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in processes(recipe())]
    assert found == ["4,5,6,7", "6,7,4,5"]
    found = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in processes(recipe(prefill=3, decode=2))]
    assert [devices.partition(",")[0] for devices in found] == ["4", "5", "6", "7", "4"]
    replacement = recipe().instance("decode-7", "decode", 7, (0,))
    assert replacement.environment["CUDA_VISIBLE_DEVICES"] == "6,7,4,5"
    on_cpu = recipe(engine=EngineConfig(model="m", device="cpu"))
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in processes(on_cpu))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in processes(recipe()))
