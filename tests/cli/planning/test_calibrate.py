"""`kvferry calibrate` on real engines: that what it writes is read, and near to what the engine takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import ModelMaker
from kvferry.cli.main import main
from kvferry.sim.times import StepWork, read_times
from support.processes import kvferry, run

ENGINE = ("--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16", "--max-num-seqs=2")


@pytest.mark.processes
def test_a_running_instance(model_maker: ModelMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = model_maker("llama", max_position_embeddings=512), tmp_path / "times.json"
    flags = ("--max-num-batched-tokens=128", "--max-num-seqs=2")
    with kvferry("decode", str(model), *ENGINE, "--served-model-name=m", flags[0], log=tmp_path / "log") as running:
        assert main(["calibrate", running.url, "--write", str(path), *flags]) == 0
    times = read_times(path)
    assert (times.model, times.kv.block_size, times.max_model_len) == ("m", 16, 512)
    assert 1e-5 < times.step.seconds(StepWork(0, 0.0, 1, 64)) < 1.0
    assert 1e-5 < times.step.seconds(StepWork(128, 128 * 129 / 2, 0, 128)) < 2.0
    assert times.step_error.num_samples >= 5
    assert str(path) in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.full
def test_p_and_d_of_its_own_and_a_simulation_with_what_they_take(model_maker: ModelMaker, tmp_path: Path) -> None:
    path, spec, trace = tmp_path / "times.json", tmp_path / "chat.toml", tmp_path / "trace.jsonl"
    model = model_maker("llama", max_position_embeddings=1024)
    done = run("calibrate", str(model), "--write", str(path), "--max-num-batched-tokens=128", *ENGINE)
    assert done.returncode == 0, done.stderr
    times = read_times(path)
    assert times.start_s > 0.1
    assert 1e5 < times.transfer.bandwidth < 1e12
    assert 1e5 < times.store.file.write_bandwidth < 1e12
    assert 1e5 < times.store.memory.read_bandwidth < 1e12
    assert times.settings["max_num_seqs"] == "2"
    spec.write_text(f'name = "chat"\nmodel = "{model}"\nmode = "pooling"\n[role.prefill]\n[role.decode]\n')
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 6, "hash_ids": [1, 2]}\n')
    done = run("simulate", str(spec), "--trace", str(trace), "--times", str(path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] == 1


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["http://127.0.0.1:9"], "127.0.0.1:9", 1),
        (["m", "--write", "/nowhere/times.json"], "--write /nowhere/times.json: there is no folder /nowhere", 2),
        (["nowhere/model"], "nowhere/model", 2),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == code
    told = capsys.readouterr().err
    assert said in told.splitlines()[-1]
