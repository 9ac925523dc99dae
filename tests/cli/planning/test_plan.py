from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.main import main
from kvferry.cli.planning.plan import spec_of
from kvferry.cli.planning.simulated import ASSUMED, world_of
from kvferry.core.settings.toml_file import to_toml
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.fleet.processes.process_settings import InstanceProcess
from kvferry.fleet.processes.recipe import recipe_of
from kvferry.fleet.spec.fleet_spec import fleet_from, read_fleet
from kvferry.sim.planner import Candidate, RouterSettings
from kvferry.sim.times import MediumTimes, StoreTimes, write_times
from kvferry.store.trace.records import TraceRequest, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, (TraceRequest(200.0 * n, 600, 8, [2 * n, 2 * n + 1]) for n in range(20)))
    return path


def test_a_plan_is_written_and_can_be_simulated(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, picture = tmp_path / "Chat 2.toml", tmp_path / "grid.svg"
    arguments = ["plan", str(trace), "--slo", "ttft=2s,itl=50ms", "--model", "m", "--write", str(spec)]
    assert main([*arguments, "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    assert "do not disaggregate: 1 plain" in said.out.replace("\n", " ")
    assert "no --times" in said.err
    assert picture.read_bytes().startswith(b"<?xml")
    fleet = read_fleet(spec)
    assert (fleet.name, fleet.model, fleet.role["both"].count) == ("chat-2", "m", 1)
    assert main(["simulate", str(spec), "--trace", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] == 20


def test_targets_that_are_out_of_reach(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """600 tokens take 28 ms by the assumed times."""
    assert main(["plan", str(trace), "--slo", "ttft=5ms", "--budget", "2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert 'Put the model that it is to serve in the place of "assumed"' in said
    assert "No deployment of up to 2 instances" in said
    assert "no number of instances changes that" in said


def test_findings_are_shown_also_where_the_spec_cannot_be_written(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(trace), "--budget", "1", "--model", "m", "--write", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "do not disaggregate: 1 plain" in said.out
    assert said.err.endswith("--write /dev/full: No space left on device\n")


def test_the_trace_is_not_overwritten(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    assert main(["plan", str(trace), "--model", "m", "--write", str(trace)]) == 2
    assert "this is --trace" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(trace), "--json", "--requests", "10", "--budget", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"]
    assert found["tried"][0]["figures"]["requests"] == 10
    assert fleet_from(tomllib.loads(found["spec"])).num_instances == 1
    assert len(found["grid"]) == 25


def test_a_store_where_prompts_begin_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One instance with it does what it takes two without. Where one is enough without, it is not worth it."""
    monkeypatch.setenv("COLUMNS", "200")
    trace, spec = tmp_path / "trace.jsonl", tmp_path / "chat.toml"
    kv, memory = msgspec.structs.replace(ASSUMED.kv, num_tokens=3072), MediumTimes(1e-6, 5e10, 5e10)
    times = msgspec.structs.replace(ASSUMED, kv=kv, store=StoreTimes(memory=memory))
    write_times(tmp_path / "times.json", times)
    write_trace(trace, (TraceRequest(40.0 * n, 1100, 2, [3 * (n % 5), 3 * (n % 5) + 1, 100 + n]) for n in range(80)))
    arguments = ["plan", str(trace), "--times", str(tmp_path / "times.json"), "--budget", "2"]
    assert main([*arguments, "--write", str(spec), "--slo", "ttft=250ms"]) == 0
    said = capsys.readouterr().out
    assert "KV: a store of 2GiB: a store would have 87% of the prompts' tokens" in said
    assert "\na store: 1 plain" in said
    assert "; without, 2 plain" in said
    fleet = fleet_from(tomllib.loads(spec.read_text()))
    assert fleet.num_instances == 1
    assert parse_transfer_config(fleet.engine.kv_transfer_config).kv_connector == "KVStoreConnector"
    assert main(["simulate", str(spec), "--trace", str(trace), *arguments[2:4], "--slo", "ttft=250ms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["within"] >= 0.99
    assert main([*arguments, "--slo", "ttft=10s", "--speed", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["store"].startswith("no store: 1 plain, chunks of 2048, a store of 2GiB keep 100.0%")
    assert found["kv"]["store"] is None
    assert "kv_transfer_config" not in found["spec"]


SPLIT = Candidate(2, 5, router=RouterSettings("prefix", "0"))


@pytest.mark.parametrize("num_bytes", [2**30, 2**41])
def test_a_store_beside_p2p(num_bytes: int) -> None:
    fleet = fleet_from(spec_of(replace(SPLIT, store_bytes=num_bytes), ASSUMED))
    options = world_of(fleet, ASSUMED).instance.options
    first, second = (one["kv_connector"] for one in options["connectors"])
    assert (first, second) == ("P2pConnector", "KVStoreConnector")
    kind = "memory:" if num_bytes == 2**30 else "file:/var/lib/kvferry"
    assert kind in str(options["connectors"][1]["kv_connector_extra_config"]["store"])


@pytest.mark.parametrize("candidate", [Candidate(both=3, chunk=512), SPLIT, replace(SPLIT, store_bytes=2**30)])
def test_a_spec_is_the_same_as_toml(candidate: Candidate) -> None:
    spec = spec_of(candidate, ASSUMED)
    assert tomllib.loads(to_toml(spec)) == spec
    assert fleet_from(spec).num_instances == candidate.num_instances
    assert fleet_from(spec).keys.router == candidate.router.values()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "0"], "--budget must be between 1 and 256"),
        (["--share", "1.5"], "--share must be above 0 and at most 1"),
        (["--plot", "grid.pdf"], "--plot grid.pdf: the name must end in .svg or .png"),
        (["--slo", "ttft=fast"], "--slo: ttft: 'fast' is not a duration"),
        (["--write", "chat.toml"], "--write: say with --model which model the spec is to serve"),
        (["--model", "m", "--write", "/nowhere/chat.toml"], "--write /nowhere/chat.toml: there is no folder /nowhere"),
        (["--model", "m", "--write", "/tmp"], "--write /tmp: this is a folder"),
        (["--times", "/dev/zero"], "--times /dev/zero has more than 16 MiB"),
    ],
)
def test_what_is_wrong_is_said_before_the_trace_is_read(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "none"), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("candidate", [Candidate(both=2, chunk=512), SPLIT])
def test_instances_of_a_plan_start(candidate: Candidate) -> None:
    """Keys of a role override those of the engine."""
    times = msgspec.structs.replace(ASSUMED, settings={"max_num_seqs": "16"})
    fleet = fleet_from(spec_of(candidate, times, "m"))
    recipe = recipe_of(fleet, "a token of tests, long enough")
    for role in fleet.role:
        settings = recipe.instance(f"{role}-0", role, 0, recipe.cores).settings
        assert isinstance(settings, InstanceProcess)
        assert settings.engine.max_num_batched_tokens == candidate.chunk
        assert settings.engine.max_num_seqs == 16


def test_settings_of_the_measured_engine_are_kept(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More sequences than the tokens of a small chunk, and ranks."""
    settings = {"max_num_seqs": "1024", "max_num_batched_tokens": "4096", "tensor_parallel_size": "2"}
    times = msgspec.structs.replace(ASSUMED, measured="today", tensor_parallel_size=2, settings=settings)
    write_times(tmp_path / "times.json", times)
    assert main(["plan", str(trace), "--times", str(tmp_path / "times.json"), "--json", "--budget", "2"]) == 0
    fleet = fleet_from(tomllib.loads(json.loads(capsys.readouterr().out)["spec"]))
    assert fleet.keys.engine == {"max_num_seqs": 1024}
    assert fleet.role["both"].tensor_parallel_size == 2
    assert fleet.keys.role["both"] == {"max_num_batched_tokens": 1024}


def test_more_requests_at_once_than_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "burst.jsonl"
    write_trace(path, (TraceRequest(0.0, 100, 4, [number]) for number in range(30)))
    assert main(["plan", str(path), "--requests", "10", "--budget", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tried"][0]["figures"]["requests"] == 10
