"""The report: a line for each step, a table beside the last committed results, and the known costs."""

from pathlib import Path

import msgspec
import pytest

from gpu import report
from gpu.card import Card
from gpu.costs import COSTS, describe_costs
from gpu.plan import choose_steps
from gpu.records import Check, Figure, Note
from gpu.runner import Outcome, State

CARD = Card("NVIDIA H100 80GB HBM3", "580.1", "9.0", 81559, "Default", "5")
FIGURES = (
    Figure("decode b8, context 4k: kvferry", 500.0, "GB/s", "the card's memory", 3000.0, 0.1667, 0.7),
    Figure("decode b8, context 4k: SDPA on gathered KV", 2000.0, "GB/s", "the card's memory", 3000.0, 0.667),
    Figure("kvferry cuda_ipc, pieces of 64 KiB", 1900.0, "GB/s", "one contiguous copy", 2000.0, 0.95, 0.9),
)


def outcomes() -> list[Outcome]:
    checks = [Check("tokens | of a CPU", True), Check("logprobs", False, "they differ by 3")]
    return [
        Outcome("doctor", State.HELD, 3.0, "", [Note("**UCX reads device memory over TCP**")]),
        Outcome("right", State.NOT_HELD, 20.0, "logprobs: they differ by 3", [*checks]),
        Outcome("kernels", State.OUT_OF_TIME, 60.0, "ended after 60 s", [*FIGURES]),
        Outcome("lmcache", State.SKIPPED, 1.0, "vLLM is not installed", []),
    ]


@pytest.fixture
def written(tmp_path: Path) -> str:
    """A report beside committed results in which 64 KiB reached 600 GB/s."""
    older = Figure("kvferry cuda_ipc, pieces of 64 KiB", 600.0, "GB/s", "a gather kernel", 1900.0, 0.31)
    before = report.make_run([CARD], [Outcome("hand-off", State.HELD, 9.0, "", [older])], fake=False)
    (tmp_path / "nvidia-h100-80gb-hbm3.json").write_bytes(msgspec.json.encode(before))
    run = report.make_run([CARD], outcomes(), fake=False)
    return report.write(run, choose_steps([], 1), tmp_path, tmp_path).read_text()


def test_each_step_is_a_line(written: str) -> None:
    assert "| doctor | what is on this machine? | 3 | **held** |" in written
    assert "| 60 | **out of time**: ended after 60 s |" in written
    assert "| 1 | **skipped**: vLLM is not installed |" in written


def test_checks_are_counted_and_those_that_failed_are_told(written: str) -> None:
    assert "1 of 2 checks hold." in written
    assert "- **logprobs: no.** they differ by 3" in written


def test_figures_stand_beside_baseline_goal_and_last_results(written: str) -> None:
    row = next(line for line in written.splitlines() if line.startswith("| kvferry cuda_ipc, pieces of 64 KiB"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["1900 GB/s", "one contiguous copy, 2000", "0.95", "0.9 reached", "600 (0.31)"]
    assert "| 0.17 | 0.7 missed |  |" in written


def test_known_costs_are_told_with_what_was_measured(written: str) -> None:
    assert "Measured: up to 75% of the time of attention (decode b8, context 4k)" in written
    assert "Measured: 0.95 of a contiguous copy." in written
    assert written.count("Not measured in this run.") == len(COSTS) - 2


def test_costs_point_at_code_that_exists() -> None:
    root = Path(__file__).parents[3] / "src" / "kvferry"
    for cost in COSTS:
        for place in cost.code.split("; "):
            path, _, name = place.partition(", ")
            source, name = (root / path).read_text(), name.rpartition(".")[2]
            assert f"def {name}(" in source or f"class {name}:" in source, place
    assert len(describe_costs({})) == len(COSTS)


def test_a_report_can_be_committed_and_read_again(tmp_path: Path) -> None:
    run = report.make_run([CARD], outcomes(), fake=False)
    report.write(run, choose_steps([], 1), tmp_path)
    (tmp_path / "report.json").rename(tmp_path / f"{CARD.slug}.json")
    assert report.committed(CARD, tmp_path) == run


def test_a_run_without_a_gpu_says_that_its_figures_say_nothing(tmp_path: Path) -> None:
    run = report.make_run([CARD], outcomes(), fake=True)
    assert "say nothing" in report.write(run, choose_steps([], 1), tmp_path).read_text()


@pytest.mark.parametrize("path", sorted(report.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_can_be_read(path: Path) -> None:
    run = msgspec.json.decode(path.read_bytes(), type=report.Run)
    assert run.cards[0].slug == path.stem
    assert not run.fake
