from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.main import main
from kvferry.cli.planning.simulated import ASSUMED
from kvferry.sim.times import StepTimes, write_times
from kvferry.store.trace.records import TraceRequest, write_trace

SPEC = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[engine]
args = ["--kv-cache-memory=256MiB"]
[role.prefill]
args = ["--max-num-batched-tokens=512"]
[role.decode]
count = 2
[router]
args = ["--disaggregate-from=0"]
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
    assert simulated("--cores=3") == alone  # for three instances
    assert simulated("--cores=1") > 1.1 * alone


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


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (("chat", "chat"), ["--slo", "tttf=1s"], "did you mean 'ttft'"),
        (("chat", "chat"), ["--times", "none.json"], "--times none.json: No such file"),
        (("chat", "chat"), ["--speed", "0"], "--speed must be above 0"),
        (("chat", "chat"), ["--from-s", "1000"], "no request between 1000 s"),
        (("[role.decode]", "[role.decoder]"), [], "did you mean 'decode'"),
        (("--max-num-batched-tokens", "--max-num-batched-token"), [], "role.prefill.args: .*--max-num-batched-token"),
        (("[engine]", '[engine]\nkind = "vllm"'), [], 'engine.kind = "vllm" is not simulated'),
        (("[engine]", '[engine]\nconnector = ["NixlConnector"]'), [], "NixlConnector is not simulated"),
        (("disaggregate-from=0", "tls-cert=cert.pem"), [], "TLS is not simulated: leave out --tls-cert"),
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
            "on ray, each machine has its own",
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
