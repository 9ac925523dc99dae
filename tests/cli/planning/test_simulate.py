from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cli.main import main
from kvferry.cli.planning.simulated import ASSUMED
from kvferry.sim.times import StepTimes, TransferTimes, write_times
from kvferry.store.trace.records import TraceRequest, write_trace

SPEC = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[engine]
kv_cache_memory = "256MiB"
[role.prefill]
max_num_batched_tokens = 512
[role.decode]
count = 2
[router]
disaggregate_from = "0"
"""
SCALED = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[role.prefill]
min = 1
max = 3
can_be = ["decode"]
[role.decode]
min = 1
max = 2
can_be = ["prefill"]
[scale]
ttft = "1500ms"
itl = "50ms"
attainment = 0.9
interval = "1s"
cool_down = "5s"
hold = "20s"
warm = "0s"
least_requests = 5
"""
P2P_OVER_TLS = '{"kv_connector": "P2pConnector", "kv_connector_extra_config": {"tls_cert": "cert.pem"}}'


def with_store(*stores: str, **settings: str) -> str:
    """The table of the engine, with a store beside P2P."""
    store = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": stores, **settings}}
    options = {"connectors": [{"kv_connector": "P2pConnector"}, store]}
    config = json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": options})
    return f"[engine]\nkv_transfer_config = '{config}'"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, (TraceRequest(100.0 * n, 600, 4, [2 * n, 2 * n + 1]) for n in range(12)))
    return path


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "chat.toml"
    path.write_text(SPEC)
    return path


def test_tables(spec: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(spec), "--trace", str(trace), "--slo", "ttft=2s,itl=50ms"]) == 0
    said = capsys.readouterr()
    for word in ("time to first token", "between two tokens", "prefill", "decode", "12 of 12 requests", "12 hand-offs"):
        assert word in said.out
    assert "no --times" in said.err


def test_json_with_measured_times(spec: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.json"
    write_times(times, msgspec.structs.replace(ASSUMED, measured="today", step=StepTimes(base_s=0.1)))
    arguments = ["simulate", str(spec), "--trace", str(trace), "--times", str(times), "--json", "--for-s", "0.55"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert not said.err
    assert (found["requests"], found["roles"]["decode"]["instances"]) == (6, 2)
    assert found["itl"]["p50"] > 0.1


def test_instances_that_share_cores_are_slower(spec: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def simulated(*more: str) -> float:
        assert main(["simulate", str(spec), "--trace", str(trace), "--speed=20", "--json", *more]) == 0
        e2e = json.loads(capsys.readouterr().out)["e2e"]["mean"]
        assert isinstance(e2e, float)
        return e2e

    alone = simulated()
    assert simulated("--cores=3") == pytest.approx(alone, rel=0.05)  # for three instances
    assert simulated("--cores=1") > 1.1 * alone


def test_router_and_client_take_cores_too(
    spec: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulated(token_s: float) -> float:
        times = tmp_path / "times.json"
        write_times(times, msgspec.structs.replace(ASSUMED, measured="today", transfer=TransferTimes(token_s=token_s)))
        arguments = ["--trace", str(trace), "--speed=20", "--json", "--cores=1", "--times", str(times)]
        assert main(["simulate", str(spec), *arguments]) == 0
        e2e = json.loads(capsys.readouterr().out)["e2e"]["mean"]
        assert isinstance(e2e, float)
        return e2e

    assert simulated(0.01) > 1.1 * simulated(0.0)


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    """A request every two seconds, and for twenty seconds three a second, each of which a prefill instance of `slow`
    computes in 0.6 s."""
    path = tmp_path / "burst.jsonl"
    at_s = [*range(0, 20, 2), *(20 + number / 3 for number in range(60)), *range(40, 90, 2)]
    write_trace(path, (TraceRequest(1000.0 * at, 600, 8, [2 * n, 2 * n + 1]) for n, at in enumerate(at_s)))
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "times.json"
    step = StepTimes(base_s=0.005, prefill_token_s=1e-3)
    write_times(path, msgspec.structs.replace(ASSUMED, measured="today", step=step, start_s=2.0))
    return path


def _scaled(spec: Path, burst: Path, slow: Path, said: pytest.CaptureFixture[str], **keys: object) -> Any:
    """What comes of a spec with `[scale]`, and with these keys in it, in JSON."""
    spec.write_text(SCALED + "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()))
    assert main(["simulate", str(spec), "--trace", str(burst), "--times", str(slow), "--json"]) == 0
    found = json.loads(said.readouterr().out)
    assert (found["complete"], found["errors"]) == (95, [])
    return found


def test_a_fleet_follows_a_burst_and_keeps_its_bounds(
    spec: Path, burst: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _scaled(spec, burst, slow, capsys)
    prefill, decode = found["roles"]["prefill"], found["roles"]["decode"]
    assert 1 == prefill["fewest"] < prefill["instances"] <= 3
    assert 1 == decode["fewest"] <= decode["instances"] <= 2
    started = [one["at"] for one in found["decisions"] if one["what"] == "start"]
    released = [one["at"] for one in found["decisions"] if one["what"] == "release"]
    assert 20 < started[0] < 30 < released[-1] < 90
    assert found["instance_s"] == pytest.approx(prefill["instance_s"] + decode["instance_s"])
    assert 2 * found["duration_s"] < found["instance_s"] < found["most_instances"] * found["duration_s"]
    assert _scaled(spec, burst, slow, capsys)["digest"] == found["digest"]


def test_recommended_counts_are_not_carried_out(
    spec: Path, burst: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _scaled(spec, burst, slow, capsys, recommend=True)
    assert (found["most_instances"], found["roles"]["prefill"]["instances"]) == (2, 1)
    assert "1 P + 1 D → 2 P + 1 D" in str(found["decisions"])


def test_a_fleet_that_stopped_everything_starts_again(
    spec: Path, burst: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(SCALED.replace("min = 1", "min = 0").replace("max", "count = 0\nmax") + 'idle = "5s"\n')
    assert main(["simulate", str(spec), "--trace", str(burst), "--times", str(slow)]) == 0
    said = capsys.readouterr().out
    assert "wake: 0 for both phases → 1 P + 1 D" in said
    assert "95 of 95 requests" in said


def test_the_targets_of_scale_unless_others_are_given(
    spec: Path, burst: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(SCALED)
    arguments = ["simulate", str(spec), "--trace", str(burst), "--times", str(slow), "--for-s", "10"]
    assert main(arguments) == main([*arguments, "--slo", "e2e=9s"]) == 0
    said = capsys.readouterr().out
    assert "requests within ttft=1.5s,itl=50ms" in said
    assert "requests within e2e=9s" in said


@pytest.mark.parametrize("stores", [("memory:1GiB",), ("file:/kv",), ("memory:256MiB", "file:/kv?max_bytes=1GiB")])
def test_stores(stores: tuple[str, ...], spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that come again when the prefix caches have forgotten them are found in the store."""
    path = tmp_path / "again.jsonl"
    write_trace(path, (TraceRequest(500.0 * n, 1000, 4, [2 * (n % 8), 2 * (n % 8) + 1]) for n in range(24)))
    spec.write_text(SPEC.replace("[engine]", with_store(*stores)).replace("256MiB", "512MiB"))
    assert main(["simulate", str(spec), "--trace", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["errors"], found["hand_offs"]) == (24, [], 24)
    assert found["stores"]["stored"] >= 8 * 31
    assert found["stores"]["loaded"] > 31
    spec.write_text(SPEC.replace("256MiB", "512MiB"))
    assert main(["simulate", str(spec), "--trace", str(path), "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["stores"] == {"stored": 0, "loaded": 0, "evicted": 0}
    assert found["roles"]["prefill"]["busy"] < without["roles"]["prefill"]["busy"]


def test_requests_that_are_a_year_apart_are_refused(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "year.jsonl"
    write_trace(trace, (TraceRequest(at_ms, 10, 2, [1]) for at_ms in (0, 31_536_000_000)))
    assert main(["simulate", str(spec), "--trace", str(trace)]) == 2
    assert "request 2 arrives 31536000 s after what is before it" in capsys.readouterr().err
    assert main(["simulate", str(spec), "--trace", str(trace), "--speed", "1000000", "--json"]) == 0


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (("chat", "chat"), ["--slo", "tttf=1s"], "did you mean 'ttft'"),
        (("chat", "chat"), ["--times", "none.json"], "--times none.json: No such file"),
        (("chat", "chat"), ["--speed", "0"], "--speed must be above 0"),
        (("chat", "chat"), ["--from-s", "1000"], "no request from 1000 s on"),
        (("[role.decode]", "[role.decoder]"), [], "did you mean 'decode'"),
        (
            ("max_num_batched_tokens", "max_num_batched_token"),
            [],
            "role.prefill.max_num_batched_token is not a known key",
        ),
        ((SPEC, SCALED), ["--cores=2"], "--cores is not simulated with .scale."),
        ((SPEC, f"{SCALED}[roll]\npause = true"), [], "a fleet that is paused is not scaled; leave out"),
        ((SPEC, f'{SCALED}[failure]\nstart = "4s"'), [], "failure.start = 4s: instances take 5 s to start"),
        ((SPEC, f'{SCALED}[engine]\nkind = "vllm"'), [], 'engine.kind = "vllm" is not simulated'),
        ((SPEC, SCALED.replace("max = 3", "")), [], "role.prefill needs max, or .scale. a budget"),
        (("[engine]", '[engine]\nkind = "vllm"'), [], "engine.kv_cache_memory is of kvferry's own engine"),
        (("count = 2", "count = 2048"), [], "the spec has 2049 instances; at most 2048 are simulated"),
        (("count = 2", "count = 1100\nkv_cache_memory = '250GiB'"), [], "blocks, .* use fewer instances"),
        (("256MiB", "1000TiB"), [], "at most 4194304 are simulated: set a smaller --kv-ca"),
        (("[engine]", '[engine]\nconnector = ["NixlConnector"]'), [], "NixlConnector is not simulated"),
        (('disaggregate_from = "0"', "tls_cert = 'cert.pem'"), [], "TLS is not simulated: leave out --tls-cert"),
        (
            ("[engine]", f"[engine]\nkv_transfer_config = '{P2P_OVER_TLS}'"),
            [],
            "TLS is not simulated: leave out kv_connector_extra_config.tls_cert",
        ),
        (("[engine]", with_store("valkey://127.0.0.1:6379")), [], "valkey.* is not simulated, only memory: and file:"),
        (("[engine]", with_store("file:/kv?codec=lossless")), [], "codec lossless, .* is not simulated"),
        (
            ("[engine]", f'[backend]\nkind = "ray"\n{with_store("memory:1GiB")}'),
            [],
            "with backend ray, each machine has its own store",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    change: tuple[str, str],
    arguments: list[str],
    said: str,
    spec: Path,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec.write_text(SPEC.replace(*change))
    assert main(["simulate", str(spec), "--trace", str(trace), *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "no --times" not in line]
    assert len(lines) == 1
    assert re.search(said, lines[0])
