"""A fleet that is changed while it serves: scaled, rolled, its instances given other roles, killed and stopped, and its
controller killed. Every request is answered, and rightly, token for token; in the end nothing is kept.

`KVFERRY_FAULTS` says how many changes at random (more in CI, thousands in `make soak`), `KVFERRY_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conftest import ModelMaker
from kvferry.fleet.places import ledger_of, running_folder
from support.fleets import SPEC, Fleet, Load, require_clean, use_state_in
from support.processes import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

NUM_CHANGES = int(os.environ.get("KVFERRY_FAULTS", "12"))
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
NAME = "changing"


@pytest.fixture
def spec(model_maker: ModelMaker) -> str:
    return SPEC.format(name=NAME, model=model_maker("llama"))


@pytest.fixture
def fleet(tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    use_state_in(tmp_path, monkeypatch)
    made = Fleet(tmp_path, NAME)
    try:
        made.apply(spec)
        yield made
    finally:
        made.delete()
    assert not running_folder(ledger_of(NAME)).joinpath("members").exists() or not list(
        running_folder(ledger_of(NAME)).joinpath("members").iterdir()
    )


@pytest.mark.full
def test_a_fleet_grows_shrinks_and_is_rolled_and_no_request_notices(fleet: Fleet) -> None:
    with Load(fleet.status.url) as load:
        fleet.scale("prefill=2", "decode=2")
        assert [len(fleet.names(role)) for role in ("prefill", "decode")] == [2, 2]
        fleet.scale("prefill=1", "decode=3")  # by a change of role
        assert sorted(fleet.names("decode", "prefill")) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        fleet.scale("decode=1")
        before = {one.revision for one in fleet.status.members}
        fleet.does("roll", NAME)
        assert before.isdisjoint(one.revision for one in fleet.status.members)
    assert load.wrong == []
    assert load.num_answers > 10
    require_clean(fleet)


@pytest.mark.full
def test_a_change_of_settings_rolls_and_can_be_rolled_back(fleet: Fleet, spec: str) -> None:
    revision = fleet.status.members[0].revision
    with Load(fleet.status.url) as load:
        fleet.apply(spec.replace("--kv-cache-memory=32MiB", "--kv-cache-memory=48MiB"))
        assert revision not in {one.revision for one in fleet.status.members if one.role != "router"}
        fleet.does("rollback", NAME)
        assert {one.revision for one in fleet.status.members if one.role != "router"} == {revision}
    assert load.wrong == []


@contextmanager
def no_controller(fleet: Fleet) -> Iterator[None]:
    """Its controller is killed; afterwards another one begins."""
    os.kill(fleet.status.pid, signal.SIGKILL)
    until(lambda: not ledger_of(NAME).has_controller, 10)
    yield
    fleet.settle()


def test_a_controller_that_dies_ends_nothing_and_the_next_takes_up_what_is_there(fleet: Fleet) -> None:
    pids = {name: fleet.pid(name) for name in fleet.names("prefill", "decode", "router")}
    with Load(fleet.status.url) as load:
        with no_controller(fleet):
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 5, 60)
        assert {name: fleet.pid(name) for name in fleet.names("prefill", "decode", "router")} == pids
        with no_controller(fleet):
            os.kill(pids["decode-0"] or 0, signal.SIGKILL)
        assert fleet.pid("decode-0") != pids["decode-0"]
    assert load.wrong == []


@pytest.mark.full
def test_random_changes(fleet: Fleet) -> None:
    dice = random.Random(SEED)

    def kill() -> None:
        _signal(fleet, dice.choice(fleet.names("prefill", "decode") or ["none"]), signal.SIGKILL)

    def stop() -> None:
        _signal(fleet, dice.choice(fleet.names("prefill", "decode") or ["none"]), signal.SIGSTOP)

    def scale() -> None:
        fleet.scale(f"prefill={dice.randint(1, 2)}", f"decode={dice.randint(1, 2)}", "--wait-s=0")

    def roll() -> None:
        fleet.does("roll", NAME, "--wait-s=0")

    def controller() -> None:
        with suppress(ProcessLookupError):
            os.kill(fleet.status.pid, signal.SIGKILL)
        fleet.does("resume", NAME, "--wait-s=0")

    changes: list[Callable[[], None]] = [kill, stop, scale, scale, roll, controller]
    done: list[str] = []
    with Load(fleet.status.url) as load:
        for _ in range(NUM_CHANGES):
            change = dice.choice(changes)
            done.append(change.__name__)
            change()
            time.sleep(dice.choice([0.0, 0.2, 1.0]))  # so that some come in the middle of others
            if dice.random() < 0.4:
                fleet.settle()
            assert load.wrong == [], f"after {done}\n{json.dumps([*map(str, fleet.status.members)], indent=1)}"
        fleet.settle()
    assert load.wrong == [], done
    require_clean(fleet)


def _signal(fleet: Fleet, member: str, number: int) -> None:
    pid = fleet.pid(member)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
