from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.conversations import Conversations
from kvferry.cli.main import main
from kvferry.store.eviction.table import eviction_names
from kvferry.store.trace.records import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, iter(Conversations(duration_s=30).requests(seed=1)))
    return path


def test_a_table_of_all_policies(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "simulate", str(trace), "--capacity", "100k", "0.5M"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in [*eviction_names(), "optimum", "infinite", "100k", "500k"])


def test_json_and_plots(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cache", "simulate", str(trace), "--capacity", "100k", "--policy", "lru", "reuse", "--json"]
    for name, magic in (("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG")):
        assert main([*arguments, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
        found = json.loads(capsys.readouterr().out)
        assert [row["policy"] for row in found["policies"]] == ["lru", "reuse"]
        assert found["policies"][0]["hit_ratio"] <= found["optimal_hit_ratio"]["100000"] <= found["infinite_hit_ratio"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "lots"], "'lots' is not a number of tokens"),
        (["--capacity", "100"], "cannot hold a block of 512"),
        (["--policy", "s3fifi"], "did you mean 's3fifo'"),
        (["--plot", "plot.gif"], "must end in .svg or .png"),
        (["--plot", "/no/such/folder/plot.svg"], "no folder /no/such/folder"),
        (["--block-tokens", "0"], "--block-tokens must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_one_line(
    trace: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "simulate", str(trace), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_broken_line_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.open("ab") as file:
        file.write(b"{}\n")
    num_lines = trace.read_bytes().count(b"\n")
    assert main(["cache", "simulate", str(trace)]) == 2
    assert f"line {num_lines}: " in capsys.readouterr().err
