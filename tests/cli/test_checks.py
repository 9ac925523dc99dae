"""What can be known to be wrong is told in one line, before anything is started or loaded: with torch blocked."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import pytest

from cli.torch_blocked import TorchBlocked
from kvferry.cli.checks import check_before_start
from kvferry.cli.flags import complete, flags_of
from kvferry.cli.main import main
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes import running
from kvferry.fleet.spec.kv_transfer import check_transfer
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.server.config import HttpAccess
from kvferry.router.config import RouterConfig
from support.ports import free_port

TINY = "kvferry/tiny-python"


def check(**listen: Any) -> None:
    check_before_start(EngineConfig(model=TINY), EngineChoice(), ListenSettings(**{"port": 0, **listen}), HttpAccess())


def test_what_is_right_passes() -> None:
    check()
    check(host="::1")
    check(host="localhost")


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "not an address", "a..b", "x" * 300])
def test_an_address_that_is_not_this_machines(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        check(host=host)


@pytest.fixture
def taken() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


def test_a_port_in_use(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken}.*another --port or another --host$"):
        check(port=taken)
    fleet = FleetShapeSettings(prefill=1, instance_ports=taken - 1)
    with pytest.raises(ConfigError, match=r"another --instance-ports$"):
        check_before_start(EngineConfig(model=TINY), EngineChoice(), ListenSettings(port=0), HttpAccess(), fleet)


def test_instances_and_the_router_do_not_get_one_port() -> None:
    port = free_port()
    fleet = FleetShapeSettings(prefill=1, decode=2, instance_ports=port - 1)
    with pytest.raises(ConfigError, match=f"gives an instance port {port}, which is the --port of all"):
        check_before_start(EngineConfig(model=TINY), EngineChoice(), ListenSettings(port=port), HttpAccess(), fleet)


def test_a_machine_that_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(
        ConfigError, match=r"No usable temporary directory .*; mount one at /tmp, or name one in TMPDIR"
    ):
        check()


def test_libraries_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = EngineConfig(model=TINY), EngineChoice(), ListenSettings(port=0), HttpAccess(), FleetShapeSettings(prefill=1)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint needs the package 'opentelemetry-sdk'"):
        check_before_start(*said, RouterConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    store = {"store": "memory:1MiB?codec=lossless"}
    with pytest.raises(ConfigError, match="codec 'lossless' needs the package 'zstandard'"):
        check_before_start(
            *said, transfer=json.dumps({"kv_connector": "KVStoreConnector", "kv_connector_extra_config": store})
        )


def test_more_memory_than_the_machine_has() -> None:
    """Of all instances together."""
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    engine, fleet = (
        EngineConfig(model=TINY, device="cpu", kv_cache_memory=str(there * 2 // 3)),
        FleetShapeSettings(prefill=1),
    )
    check_before_start(engine, EngineChoice(), ListenSettings(port=0), HttpAccess())
    with pytest.raises(ConfigError, match=r"--kv-cache-memory \d+ for each of 2 instances: this machine has"):
        check_before_start(engine, EngineChoice(), ListenSettings(port=0), HttpAccess(), fleet)


def test_more_instances_than_a_machine_runs() -> None:
    with pytest.raises(ConfigError, match="ask for 20000 instances on this machine; at most 256"):
        FleetShapeSettings(prefill=10_000, decode=10_000)


@pytest.mark.parametrize(
    ("transfer", "told"),
    [
        ({"kv_connector": "P2pConnector", "kv_ip": "192.0.2.1"}, "cannot listen on kv_ip 192.0.2.1"),
        (
            {
                "kv_connector": "SharedStorageConnector",
                "kv_connector_extra_config": {"shared_storage_path": "/proc/nowhere"},
            },
            "cannot keep KV blocks in /proc/nowhere",
        ),
    ],
)
def test_what_the_connectors_of_a_fleet_need(transfer: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_before_start(
            EngineConfig(model=TINY),
            EngineChoice(),
            ListenSettings(port=0),
            HttpAccess(),
            FleetShapeSettings(prefill=1),
            transfer=json.dumps(transfer),
        )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"policy": "prefx"}, "did you mean 'prefix'"),
        ({"policy_option": ("pressure=much",)}, "--policy-option of cost"),
        ({"policy_option": ("presure=1",)}, "did you mean 'pressure'"),
        ({"policy_option": ("pressure=1", "pressure=2")}, "pressure is given twice"),
    ],
)
def test_policies_of_the_router(said: dict[str, Any], told: str) -> None:
    router = RouterConfig(**said)
    with pytest.raises(ConfigError, match=told):
        check_before_start(
            EngineConfig(model=TINY), EngineChoice(), ListenSettings(port=0), HttpAccess(), router=router
        )


@pytest.mark.parametrize("name", ["a b", "X-Session-Id:", "é"])
def test_the_header_that_names_a_conversation(name: str) -> None:
    with pytest.raises(ConfigError, match="--session-header must be the name of a header"):
        RouterConfig(session_header=name)


def test_addresses_for_kv_events() -> None:
    with pytest.raises(ConfigError, match="--kv-events 'nowhere' is not an address"):
        EngineConfig(model=TINY, kv_events="nowhere")
    with pytest.raises(ConfigError, match="--kv-events-replay 'x' is not an address"):
        EngineConfig(model=TINY, kv_events="tcp://127.0.0.1:*", kv_events_replay="x")
    engine, fleet = EngineConfig(model=TINY, kv_events="tcp://127.0.0.1:5557"), FleetShapeSettings(prefill=1)
    with pytest.raises(ConfigError, match=r"several instances cannot share one address; give port \*"):
        check_before_start(engine, EngineChoice(), ListenSettings(port=0), HttpAccess(), fleet)


@pytest.mark.parametrize(
    "config", [EngineConfig, InstanceSettings, EngineChoice, ListenSettings, RouterConfig, HttpAccess]
)
def test_nothing_that_is_given_is_empty(config: Any) -> None:
    """A variable that is not set makes `--kv-transfer-config "$CONFIG"` empty: that is not the default."""
    for name, hint in get_type_hints(config).items():
        empty = {str: "", str | None: "", tuple[str, ...]: ("",)}.get(hint)
        if empty is not None and name != "model":
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must not be empty"):
                complete(config, flags_of(config, ("model",))(**{name: empty}))
    with pytest.raises(ConfigError, match="--model must not be empty"):
        complete(EngineConfig, flags_of(EngineConfig, ("model",))(), model="")


def test_a_port_whose_last_connections_are_still_closing_is_free() -> None:
    """As when a server was ended a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listening.accept()[0].close()  # this side closes first, so its address waits
    check(port=port)


TRANSFERS = [
    ({"kv_connector": "P2pConector"}, "did you mean 'P2pConnector'"),
    ({"kv_connector": "P2pConnector", "kv_port": 70000}, "kv_port must be between"),
    ({"kv_connector": "P2pConnector", "kv_buffer_size": 0}, "kv_buffer_size must be above 0"),
    ({"kv_connector": "P2pConnector", "kv_role": "producer"}, "kv_role"),
    ({"transport": "shn"}, "unknown transport 'shn'; did you mean 'shm'"),
    ({"transport": 3}, "kv_connector_extra_config.transport"),
    ({"transpot": "shm"}, "did you mean 'transport'"),
    ({"lease_s": 0}, "lease_s: must be 0.01 to"),
    ({"lease_s": "soon"}, "kv_connector_extra_config.lease_s"),
    ({"streams": 17}, "streams: must be 1 to 16"),
    ({"tls_key": "/nowhere"}, "tls_key needs .*tls_cert"),
    ({"tls_cert": "/nowhere", "tls_ca": "/nowhere"}, "tls_cert /nowhere: No such file"),
    ({"advertise_port": -1}, "advertise_port: must be 0 to 65535"),
    ({"advertise_host": "a..b"}, "advertise_host: must be a name or an address of a machine, got a..b"),
    ({"lookup_buffer": "fabrik"}, "did you mean 'fabric'"),
    ({"lookup_buffer": "valkey"}, "by a store: .*KVStoreConnector.*valkey://host"),
    ({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"valkey_url": "unix:///s"}}, "by a store: "),
    ({"decoder_kv_blocks_ttl": -5}, "decoder_kv_blocks_ttl: must be 0.01 to"),
    ({"kv_connector": "SharedStorageConnector"}, "needs kv_connector_extra_config.shared_storage_path"),
    (
        {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_pat": "x"}},
        "did you mean 'shared_storage_path'",
    ),
    (
        {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/etc/hosts"}},
        "is not a directory",
    ),
]


@pytest.mark.parametrize(("said", "told"), TRANSFERS)
def test_settings_of_connectors(said: dict[str, Any], told: str) -> None:
    whole = said if "kv_connector" in said else {"kv_connector": "P2pConnector", "kv_connector_extra_config": said}
    with pytest.raises(ConfigError, match=told):
        check_transfer(json.dumps(whole))


@pytest.mark.parametrize(
    "said",
    [
        {"kv_connector": "P2pConnector"},
        {"kv_connector": "P2pNcclConnector"},
        {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": "gloo", "checksum": True}},
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": {"shared_storage_path": "/nowhere/yet"},
        },
    ],
)
def test_settings_that_are_right(said: dict[str, Any]) -> None:
    check_transfer(json.dumps(said))


@pytest.mark.parametrize(("name", "modules"), [("nixl", ("nixl", "nixl_cu12")), ("mooncake", ("mooncake",))])
def test_a_library_that_is_not_installed(name: str, modules: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    said = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": name}}
    with pytest.raises(ConfigError, match=rf"pip install 'kvferry\[{name}\]'"):
        check_transfer(json.dumps(said))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--kv-cache-memory", "many"], "--kv-cache-memory: 'many' is not a size"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory must be more than 0"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--num-threads", "0"], "--num-threads must be at least 1"),
        (["--max-restarts", "-1"], "--max-restarts must not be negative"),
        (["--instance-ports", "65535", "--prefill", "1"], "the last instance's port would be 65536"),
        (["--prefill", "1", "--host", "nowhere.invalid"], "--host nowhere.invalid is not an address"),
        (
            ["--kv-transfer-config", '{"kv_connector":"P2pConnector","kv_connector_extra_config":{"strems":2}}'],
            "streams",
        ),
        (["--prefill", "1", "--log-level", "loud"], "--log-level"),
    ],
)
def test_nothing_is_loaded_first(more: list[str], told: str, blocked: TorchBlocked) -> None:
    require_told(blocked, ["serve", TINY, "--port", "0", *more], told)


@pytest.mark.parametrize("command", [["serve"], ["serve", "--prefill", "1"], ["prefill"], ["decode"]])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--device", "cpu", "--kv-cache-memory", "900TiB"], "--kv-cache-memory 900TiB"),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector":"KVStoreConnector","kv_connector_extra_config":{"store":"file:/proc/x"}}',
            ],
            "--kv-transfer-config: cannot keep KV blocks in /proc/x: No such file",
        ),
    ],
    ids=["memory", "folder"],
)
def test_what_the_machine_lacks_is_told_before_anything_is_loaded(
    command: list[str], more: list[str], told: str, blocked: TorchBlocked
) -> None:
    require_told(blocked, [command[0], TINY, *command[1:], "--port", "0", *more], told)


CACHE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_producer"}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("role", "fits"), [("kv_producer", False), ("kv_consumer", True), ("kv_both", True)])
def test_what_an_instance_registers_for_it_can_do(
    role: str, fits: bool, within: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "the token of tests")
    monkeypatch.setattr(running, "RUN_INSTANCE", "nowhere:run")
    one = {"kv_connector": "P2pConnector", "kv_role": role}
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [CACHE, one]}}
    transfer = json.dumps(several if within else one)
    assert main(["serve", TINY, "--port=0", "--register=http://127.0.0.1:9", "--kv-transfer-config", transfer]) == 2
    refused = "--register: the instance registers for decode, but --kv-transfer-config gives it kv_role kv_producer"
    told = capsys.readouterr().err
    assert (refused in told, "cannot import 'nowhere'" in told) == (not fits, fits)


MISSING = {
    "kvferry/tiny-pyton": "did you mean",
    "/nowhere/model": "there is no directory",
    __file__: "is a file; give the directory",
}


@pytest.mark.parametrize("command", ["serve", "prefill", "decode", "demo"])
@pytest.mark.parametrize("model", MISSING)
def test_models_that_are_not_there(command: str, model: str, blocked: TorchBlocked) -> None:
    require_told(blocked, [command, model, "--port", "0"], MISSING[model])


@pytest.mark.parametrize("model", ["kvferry/tiny-pyton", "/nowhere/model"])
def test_models_that_are_not_there_with_vllm(model: str, blocked: TorchBlocked, tmp_path: Path) -> None:
    from cli import fake_vllm

    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_vllm.__file__} "$@"\n')
    script.chmod(0o755)
    flags = ["--engine", "vllm", "--engine-python", str(script), "--prefill", "1", "--port", "0"]
    require_told(blocked, ["serve", model, *flags], "did you mean" if "tiny" in model else "there is no directory")


def require_told(blocked: TorchBlocked, arguments: list[str], told: str) -> None:
    done = blocked.run(*arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert told in line
