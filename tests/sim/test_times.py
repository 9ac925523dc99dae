from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvferry.core.errors import ConfigError
from kvferry.sim.times import (
    FitError,
    KVSize,
    MachineTimes,
    StepTimes,
    StepWork,
    TransferTimes,
    read_times,
    write_times,
)

TIMES = MachineTimes(
    model="m",
    machine="a machine",
    measured="2026-01-02",
    step=StepTimes(base_s=0.5),
    step_error=FitError(3, 0.01, 0.02, 0.03),
    kv=KVSize(2, 1024, 4096),
    transfer=TransferTimes(bandwidth=1e9),
)


def test_a_step_takes_the_sum_of_what_it_computes() -> None:
    times = StepTimes(
        base_s=1.0,
        prefill_token_s=0.1,
        prefill_pair_s=0.01,
        decode_sequence_s=10.0,
        context_token_s=0.001,
        request_s=100.0,
    )
    assert times.seconds(StepWork()) == 1.0
    assert times.seconds(StepWork(20, 300.0, 2, 4000, 1)) == pytest.approx(1 + 2 + 3 + 20 + 4 + 100)


def test_times_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_times(path, TIMES)
    assert read_times(path) == TIMES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stepp": {}}, "times.stepp is not a known key; did you mean 'step'"),
        ({"step": {"bas_s": 1.0}}, "step.bas_s is not a known key; did you mean 'base_s'"),
        ({"step": {"base_s": -1.0}}, "step.base_s: must be 0 to"),
        ({"transfer": {"bandwidth": 0}}, "transfer.bandwidth: must be greater than 0"),
        ({"kv": {"num_layers": 2}}, "kv.token_bytes is required"),
        ({"kv": 3}, "times.kv"),
        ({"model": None}, "times.model"),
    ],
)
def test_what_is_wrong_with_a_file_of_times(change: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(TIMES) | change))
    with pytest.raises(ConfigError, match=said):
        read_times(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"name = 1"])
def test_what_is_no_file_of_times(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no file of `kvferry calibrate`"):
        read_times(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_times(tmp_path / "none")
    with pytest.raises(ConfigError, match="--times /dev/zero has more than 16 MiB"):
        read_times(Path("/dev/zero"))
