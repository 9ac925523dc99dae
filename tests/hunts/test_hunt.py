"""Many seeds at once, and scenarios that are shrunk to what they need to fail."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hunts import __main__ as command
from hunts.faults import Fault
from hunts.hunt import DIFFERS, hunt, run_seed, shrink
from hunts.invariants import Violation
from hunts.scenario import Report, Scenario, draw, run
from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.core import entropy
from support.planted import Plant

ROOT = Path(__file__).parents[2]


def test_processes_give_what_one_gives() -> None:
    seeds = range(1, 7)
    together = list(hunt(seeds, jobs=2, twice_every=3))
    assert [(one.seed, one.digest) for one in together] == [(one.seed, one.digest) for one in hunt(seeds)]
    assert not any(one.violations for one in together)


def test_a_seed_that_does_not_repeat_itself_is_found(plant: Plant) -> None:
    number = iter(range(10**6))
    plant(entropy, "token_hex", lambda num_bytes: f"{next(number):0{2 * num_bytes}x}")
    assert DIFFERS in {one.name for one in run_seed(2, twice=True).violations}


def _scenario() -> Scenario:
    scenario = draw(1)
    faults = [Fault(float(place), "stall", 0.0, 0.0, 0.1) for place in range(6)]
    return replace(scenario, requests=scenario.requests[:5], faults=faults)


def test_what_a_failure_does_not_need_is_taken_away() -> None:
    """It fails for as long as one request and two faults are there."""
    whole = _scenario()

    def judged(scenario: Scenario) -> Report:
        times = {one.at_s for one in scenario.faults}
        fails = {1.0, 4.0} <= times and whole.requests[3] in scenario.requests
        return Report(1, violations=[Violation("it holds", "")] if fails else [])

    found = shrink(whole, run=judged)
    assert found is not None
    assert (found.requests, found.faults) == ([3], [1, 4])
    assert found.command() == "python -m hunts 1 --requests 3 --faults 1,4 --log"
    assert shrink(whole.only([0], []), run=judged) is None


def test_another_failure_is_not_taken_for_the_same() -> None:
    def judged(scenario: Scenario) -> Report:
        return Report(1, violations=[Violation("one" if len(scenario.faults) == 6 else "another", "")])

    found = shrink(_scenario(), run=judged)
    assert found is not None
    assert len(found.faults) == 6


def test_shrinking_has_an_end() -> None:
    def judged(scenario: Scenario) -> Report:
        return Report(1, violations=[Violation("it holds", "")] if len(scenario.requests) == 5 else [])

    found = shrink(_scenario(), max_runs=7, run=judged)
    assert found is not None
    assert found.num_runs <= 7


def test_a_planted_mistake_is_shrunk_and_runs_again(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(self: P2pSchedulerSide, report: Any) -> None:
        if report:
            raise ValueError("a mistake")

    plant(P2pSchedulerSide, "completed", fail)
    found = shrink(draw(1), max_runs=12)
    assert found is not None
    assert len(found.requests) < len(draw(1).requests)
    assert not found.faults
    arguments = found.command().split()[3:]
    assert command.main(arguments) == 1
    assert "no error is logged" in capsys.readouterr().out


def test_an_output_that_nobody_reads() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    told = [sys.executable, "-m", command.__name__, "1"]
    done = subprocess.run(told, check=False, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_seeds_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["2-3", "--no-faults"]) == 0
    assert "2 seeds, 0 failed" in capsys.readouterr().out
    assert command.main(["3", "--shrink"]) == 0
    assert "everything holds" in capsys.readouterr().out
    assert run(draw(3).only([], [])).outcomes == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x"], "'x' is not a seed, or a range such as 1-200"),
        (["5-1"], "'5-1' is not a seed, or a range such as 1-200"),
        (["17", "--faults", "999"], "faults, which are counted from 0"),
        (["17", "--faults", "-1"], "'-1' is not a list such as 0,3, or none"),
        (["17", "--jobs", "0"], "'0' is not a number of at least 1"),
        (["17", "--twice", "-1"], "'-1' is not a number of at least 1"),
        (["1-99999999999"], "more than 10000000 seeds at once"),
    ],
)
def test_what_cannot_be_run_is_said_and_is_no_success(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
