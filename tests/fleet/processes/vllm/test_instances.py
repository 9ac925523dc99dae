"""From what was said to the command line of each vLLM server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fleet.processes.test_recipe import recipe
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.cpu import Cores, cores_of
from kvferry.fleet.processes.process import ExternalServer, ProcessSpec, RouterGroup
from kvferry.fleet.processes.process_settings import RouterProcess
from kvferry.fleet.processes.recipe import LocalRecipe
from kvferry.fleet.processes.vllm import instances
from kvferry.fleet.processes.vllm.environment import find_vllm
from kvferry.fleet.processes.vllm.instances import START
from kvferry.fleet.processes.vllm.ports import SPACING, free_ports
from kvferry.fleet.processes.vllm.resources import share_devices, visible_devices
from kvferry.fleet.spec.fleet_spec import MemberRole
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings

PYTHONS = Path(__file__).parents[3] / "support" / "vllm_pythons"
ON_GPU = PYTHONS / "on_gpu"
LOG = Path(__file__).with_name("vllm_start.txt")


@pytest.fixture(autouse=True)
def _an_environment_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def fleet(
    prefill: int = 1,
    decode: int = 1,
    transfer: Any = None,
    arguments: tuple[str, ...] = (),
    python: Path = PYTHONS / "on_cpu",
) -> LocalRecipe:
    return recipe(
        prefill,
        decode,
        None,
        engine=EngineConfig(model="some/model"),
        instance=InstanceSettings(kv_transfer_config=None if transfer is None else json.dumps(transfer)),
        spec=FleetShapeSettings(prefill=prefill, decode=decode),
        listen=ListenSettings(host="127.0.0.2", port=9000),
        choice=EngineChoice(engine="vllm", engine_python=str(python), engine_argument=arguments),
    )


def cores_at(number: int, made: LocalRecipe) -> Cores:
    return cores_of(number, made.num_instances, made.cores)


def servers(made: LocalRecipe) -> list[ProcessSpec]:
    """All of them, as the backend asks for them."""
    names: list[tuple[str, MemberRole]] = [
        (f"{role}-{index}", role) for role, one in made.fleet.role.items() for index in range(one.count)
    ]
    return [made.instance(name, role, number, cores_at(number, made)) for number, (name, role) in enumerate(names)]


def flag(spec: ProcessSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def transfer_of(spec: ProcessSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(flag(spec, "--kv-transfer-config"))
    return found


def test_each_server_has_a_role_and_ports_and_cores_of_its_own() -> None:
    made = fleet(prefill=2, arguments=("--dtype", "float32", "-O3"))
    found = servers(made)
    assert [spec.name for spec in found] == ["prefill-0", "prefill-1", "decode-0"]
    for number, spec in enumerate(found):
        cores = cores_at(number, made)
        assert spec.command[:5] == (str(PYTHONS / "on_cpu"), "-m", "vllm.entrypoints.cli.main", "serve", "some/model")
        assert spec.command[-3:] == ("--dtype", "float32", "-O3")
        assert flag(spec, "--host") == "127.0.0.1"
        assert flag(spec, "--served-model-name") == "some/model"
        assert isinstance(spec.foreign, ExternalServer)
        assert spec.foreign.url == f"http://127.0.0.1:{flag(spec, '--port')}"
        assert spec.environment["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, cores))
        assert spec.environment["OMP_NUM_THREADS"] == str(len(cores))
    assert [transfer_of(spec)["kv_role"] for spec in found] == ["kv_producer", "kv_producer", "kv_consumer"]
    ports = [flag(spec, "--port") for spec in found]
    side_channels = [spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for spec in found]
    assert len({*ports, *side_channels}) == 6
    assert len({spec.environment["KVFERRY_AUTH_TOKEN"] for spec in found}) == 1


def test_threads_are_not_bound_to_cores_where_a_container_is_allowed_fewer_cpus() -> None:
    made = instances.VllmInstances.from_settings(
        EngineConfig(model="some/model"),
        EngineChoice(engine="vllm", engine_python=str(PYTHONS / "on_cpu")),
        InstanceSettings(),
        is_disaggregated=True,
    )
    place = instances.VllmPlacement("decode", "decode-0", 0, "127.0.0.1", 9000, (0, 1, 2, 3), 1, {})
    environment = made.process(place).environment
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind", "else vLLM starts a thread for each core"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_the_router_finds_out_how_they_hand_over(tmp_path: Path) -> None:
    settings = fleet().router_member("router-0", RouterGroup(tmp_path, ())).settings
    assert isinstance(settings, RouterProcess)
    assert (settings.listen.host, settings.listen.port, settings.router.protocol) == ("127.0.0.2", 9000, "auto")
    router = settings.router
    assert (router.bootstrap_port, router.prefill_url, router.decode_url) == ((), (), ())


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, "KvferryP2pConnector"),
        ({"kv_connector": "P2pConnector"}, "KvferryP2pConnector"),
        (
            {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/tmp/kv"}},
            "KvferrySharedStorageConnector",
        ),
        ({"kv_connector": "NixlConnector"}, "NixlConnector"),
        ({"kv_connector": "SomebodysConnector", "kv_connector_module_path": "json.decoder"}, "SomebodysConnector"),
    ],
)
def test_connectors(said: Any, found: str) -> None:
    transfer = transfer_of(servers(fleet(transfer=said))[0])
    assert transfer["kv_connector"] == found
    assert transfer["kv_load_failure_policy"] == "recompute"


def test_what_the_json_says_stays_but_for_what_must_differ() -> None:
    said = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_port": 14579,
        "engine_id": "e",
        "kv_load_failure_policy": "fail",
        "a_key_nobody_knows": 1,
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}], "other": 2},
    }
    prefill, decode = (transfer_of(spec) for spec in servers(fleet(transfer=said)))
    assert {**prefill, "kv_connector_extra_config": None} == {
        **said,
        "engine_id": "e-prefill-0",
        "kv_connector_extra_config": None,
    }
    assert (decode["engine_id"], decode["kv_port"]) == ("e-decode-0", 14580)
    assert decode["kv_connector_extra_config"] == {
        "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}],
        "other": 2,
    }


def test_keys_that_vllm_has_no_place_for_reach_kvferrys_connector() -> None:
    said = {"kv_connector": "P2pConnector", "kv_ip": "10.0.0.1", "kv_connector_extra_config": {"lease_s": 3}}
    transfer = transfer_of(servers(fleet(transfer=said))[0])
    assert "kv_ip" not in transfer
    assert transfer["kv_connector_extra_config"] == {"lease_s": 3, "kv_ip": "10.0.0.1"}


def test_servers_with_lmcache_agree_on_the_names_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes with Python's `hash`, whose seed is each process's own."""
    lmcache = {"kv_connector": "LMCacheConnectorV1"}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [lmcache]}}
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for transfer, seed in (lmcache, "0"), (both, "0"), ({"kv_connector": "NixlConnector"}, None):
        started = servers(fleet(transfer=transfer, python=ON_GPU))
        assert {one.environment.get("PYTHONHASHSEED") for one in started} == {seed}
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # inherited
    assert {one.environment.get("PYTHONHASHSEED") for one in servers(fleet(transfer=lmcache, python=ON_GPU))} == {None}


def test_mooncakes_bootstrap_servers_have_ports_that_the_controller_knows() -> None:
    """It declares them to the routers."""
    found = servers(fleet(prefill=2, transfer={"kv_connector": "MooncakeConnector"}, python=ON_GPU))
    ports = [spec.environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") for spec in found]
    assert ports == [str(found[0].bootstrap_port), str(found[1].bootstrap_port), None]
    assert found[0].bootstrap_port != found[1].bootstrap_port
    assert found[2].bootstrap_port is None


def test_without_a_split_one_server_listens_where_it_was_said_and_moves_nothing() -> None:
    made = fleet(prefill=0, decode=0)
    (spec,) = servers(made)
    assert made.num_routers == 0
    assert list(made.addresses) == []
    assert (flag(spec, "--host"), flag(spec, "--port")) == ("127.0.0.2", "9000")
    assert "--kv-transfer-config" not in spec.command


@pytest.mark.parametrize("argument", ["--tensor-parallel-size=2", "-tp", "--data-parallel-size"])
def test_several_workers_choose_their_cores_themselves(argument: str) -> None:
    for spec in servers(fleet(arguments=(argument, "2"))):
        assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.environment


@pytest.mark.parametrize("arguments", [("-tp", "1"), ("--tensor-parallel-size=1",), ("--data_parallel_size", "1")])
def test_one_worker_is_bound_to_its_cores(arguments: tuple[str, ...]) -> None:
    for spec in servers(fleet(arguments=arguments)):
        assert spec.environment["VLLM_CPU_OMP_THREADS_BIND"]


def test_what_is_said_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert servers(fleet())[0].full_environment()["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"arguments": ("--port", "1")}, "--port after -- is set by kvferry; give it before --"),
        ({"arguments": ("--kv_transfer_config={}",)}, "--kv-transfer-config after --"),
        ({"arguments": ("--model=x",)}, "--model after -- is set by kvferry; give it as MODEL"),
        ({"transfer": {"kv_role": "kv_both"}}, 'names no "kv_connector"'),
        ({"transfer": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}, "cannot have kv_role kv_producer"),
        ({"transfer": []}, "must be a JSON object"),
    ],
)
def test_what_cannot_be_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        servers(fleet(**settings))


def test_flags_of_the_other_engine_are_refused() -> None:
    settings = EngineConfig(model="m", block_size=16)
    with pytest.raises(
        ConfigError, match=r"--block-size is a flag of kvferry's own engine; .* as in: -- --block-size 16"
    ):
        instances.VllmInstances.from_settings(
            settings, EngineChoice(engine="vllm"), InstanceSettings(), is_disaggregated=True
        )
    with pytest.raises(ConfigError, match="add --engine vllm"):
        EngineChoice(engine_argument=("--dtype",))


def test_kvferrys_connectors_need_kvferry_in_vllms_environment() -> None:
    python = PYTHONS / "without_kvferry"
    with pytest.raises(ConfigError, match=f"{python} does not know kvferry's connectors: install kvferry there"):
        servers(fleet(python=python))
    assert servers(fleet(python=python, transfer={"kv_connector": "NixlConnector"}))


def test_memory_is_shared_unless_the_user_says_how() -> None:
    sizes = [int(flag(spec, "--kv-cache-memory-bytes")) for spec in servers(fleet(prefill=2))]
    assert 0 < sum(sizes) <= psutil.virtual_memory().total / 2
    for argument in ("--kv-cache-memory-bytes=7", "--gpu_memory_utilization=0.2"):
        spec = servers(fleet(arguments=(argument,)))[0]
        assert "--kv-cache-memory-bytes" not in spec.command
    assert "--kv-cache-memory-bytes" not in servers(fleet(prefill=0, decode=0))[0].command


def test_devices_are_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3, 5,7")
    found = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in servers(fleet())]
    assert found == ["2,3", "5,7"]
    found = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in servers(fleet(prefill=4, decode=2))]
    assert found == ["2", "3", "5", "7", "2", "3"]
    assert share_devices(["2", "3", "5", "7"], 5, 2) == ["5", "7"]  # the sixth member of a fleet of two: of a roll
    assert share_devices(["2"], 5, 2) == ["2"]
    assert "CUDA_VISIBLE_DEVICES" not in servers(fleet(prefill=0, decode=0))[0].environment
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["2", "10"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


def test_environments_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--engine-python /nowhere/python is not a file"):
        find_vllm("/nowhere/python")
    with pytest.raises(ConfigError, match="is not a Python that works"):
        find_vllm("/bin/false")
    with pytest.raises(ConfigError, match="cannot be run"):
        find_vllm(str(LOG))
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    with pytest.raises(ConfigError, match=r"there is no vLLM in the environment of .* with --engine-python"):
        find_vllm(str(empty))
    empty.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ConfigError, match=r"--engine-python .*/python has not said within 0.1 s what is in it$"):
        find_vllm(str(empty), timeout_s=0.1)


def test_ports_are_free_and_apart() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(abs(one - other) >= SPACING for one in ports for other in ports if one != other)


def test_a_port_that_was_given_out_does_not_come_up_again_soon() -> None:
    """Nobody listens on it before the program that it is for has started."""
    ports = [free_ports(1)[0] for _ in range(200)]
    assert len(set(ports)) == 200


def test_vllms_log_tells_how_far_its_start_is() -> None:
    """The log of a vLLM 0.32 server on a CPU, shortened."""
    seen = [ExternalServer("", START).progress_of(line) for line in LOG.read_text().splitlines()]
    told = [progress for progress in seen if progress is not None]
    assert [progress.progress for progress in told] == sorted({progress.progress for progress in told})
    assert len(told) >= 6


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("P2pConnector", None),
        ("NixlConnector", None),
        ("KVStoreConnector", {"store": "file:/kv"}),
        ("SharedStorageConnector", {"shared_storage_path": "/kv"}),
        ("MultiConnector", [{"kv_connector": "P2pConnector"}]),
        ("MultiConnector", [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "P2pConnector"}]),
    ],
)
def test_what_a_server_registers_for_it_can_do(connector: str, extra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alone registers for decode."""
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "the token of tests")

    def alone(kv_role: str, *register: str) -> ProcessSpec:
        transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": kv_role}
        if isinstance(extra, list):
            parts = [*extra[:-1], {**extra[-1], "kv_role": kv_role}]
            transfer = {"kv_connector": connector, "kv_connector_extra_config": {"connectors": parts}}
        elif extra:
            transfer["kv_connector_extra_config"] = extra
        one = fleet(0, 0, transfer)
        instance = msgspec.structs.replace(one.settings.instance, register=register)
        one = replace(one, settings=replace(one.settings, instance=instance))
        one.check()
        (found,) = servers(one)
        return found

    assert alone("kv_producer").registrar is None
    for kv_role in ("kv_consumer", "kv_both"):
        assert alone(kv_role, "http://127.0.0.1:9").registrar is not None
    with pytest.raises(
        ConfigError, match=r"--register: .* for decode, but --kv-transfer-config: .* kv_role kv_producer"
    ):
        alone("kv_producer", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "python_path"),
    [(None, [str(instances.SLEEPING_WAITS)]), ("/mine", [str(instances.SLEEPING_WAITS), "/mine"])],
)
def test_threads_that_wait_sleep_in_servers_for_cpus(
    given: str | None, python_path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    for server in servers(fleet()):
        assert server.environment["PYTHONPATH"].split(os.pathsep) == python_path
    monkeypatch.setenv("KVFERRY_CALM_VLLM", "0")
    assert all("PYTHONPATH" not in server.environment for server in servers(fleet()))
    monkeypatch.delenv("KVFERRY_CALM_VLLM")
    on_gpu = fleet(python=ON_GPU)
    assert all("PYTHONPATH" not in server.environment for server in servers(on_gpu)), "on a GPU as they are"


def test_a_sitecustomize_of_the_users_is_run_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['RAN'] = __file__\n")
    code = "import os; begun = os.times().elapsed; os.sched_yield(); print(os.sched_yield.__name__, os.environ['RAN'])"
    path = os.pathsep.join([str(instances.SLEEPING_WAITS), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["_sleep", str(tmp_path / "sitecustomize.py")]


@pytest.mark.parametrize(
    "flags", [("--api-key=the-key",), ("--api-key", "the-key"), ("--api_key", "the-key"), ("--api-k", "the-key")]
)
def test_the_key_of_a_server_is_not_on_its_command_line(flags: tuple[str, ...]) -> None:
    for spec in servers(fleet(arguments=(*flags, "--dtype", "float32"))):
        assert not any("key" in one for one in spec.command)
        assert spec.command[-2:] == ("--dtype", "float32")
        assert spec.environment["VLLM_API_KEY"] == "the-key"


def test_what_would_put_a_secret_on_a_command_line_is_refused() -> None:
    stores = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": "valkey://:pw@h:6379"}}
    with pytest.raises(ConfigError, match="password_file"):
        fleet(transfer=stores)
    with pytest.raises(ConfigError, match="one key only"):
        fleet(arguments=("--api-key", "a", "b"))
