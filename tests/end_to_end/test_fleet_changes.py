"""A fleet that is changed while it serves: scaled, rolled, its instances given other roles, killed and stopped, and its
controller killed. Every request is answered, and rightly, token for token; in the end nothing is kept.

`KVFERRY_FAULTS` says how many changes at random (more in CI, hundreds in `make soak`), `KVFERRY_SEED` which.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from conftest import ModelMaker
from kvferry.fleet.places import ledger_of, running_folder
from kvferry.fleet.processes.process import PROGRAM
from support.fleets import SPEC, Fleet, Load, change_at_random, require_clean, use_state_in
from support.processes import is_running
from support.waiting import until

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
        fleet.apply(spec.replace('kv_cache_memory = "32MiB"', 'kv_cache_memory = "48MiB"'))
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
            _signal(pids["decode-0"], signal.SIGKILL)
        assert fleet.pid("decode-0") != pids["decode-0"]
    assert load.wrong == []


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_random_changes(fleet: Fleet) -> None:
    """The process that forks instances is killed and stopped too, in the middle of a start."""
    rng = random.Random(SEED)

    def strike(member: str, number: int) -> None:
        _signal(fleet.pid(member), number)

    def forking_process() -> None:
        with suppress(psutil.Error):
            for one in psutil.Process(fleet.status.pid).children():
                if "kvferry.fleet.backends.local.fork_main" in one.cmdline():
                    _signal(one.pid, rng.choice([signal.SIGKILL, signal.SIGSTOP]))

    change_at_random(fleet, rng, NUM_CHANGES, strike, forking_process)


UNITS = """
name = "{name}"
model = "{model}"
mode = "replica"
served_model_name = ["m"]
grace_s = 5
[engine]
dtype = "float32"
kv_cache_memory = "32MiB"
[unit]
members = {{ prefill = 1, decode = 1 }}
count = 2
[router]
port = 0
count = 2
disaggregate_from = "0"
[failure]
backoff = ["100ms", "1s"]
restart = "{restart}"
"""


@pytest.mark.full
@pytest.mark.parametrize("restart", ["instance", "unit"])
def test_a_whole_unit_dies_at_once(
    restart: str, tmp_path: Path, model_maker: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_state_in(tmp_path, monkeypatch)
    fleet = Fleet(tmp_path, NAME)
    try:
        fleet.apply(UNITS.format(name=NAME, model=model_maker("llama"), restart=restart))
        with Load(fleet.status.url) as load:
            units = {one.unit for one in fleet.ready("prefill")}
            for unit in sorted(units):
                lost = {one.name: fleet.pid(one.name) for one in fleet.ready("prefill", "decode") if one.unit == unit}
                assert len(lost) == 2
                for pid in lost.values():
                    _signal(pid, signal.SIGKILL)
                until(lambda: not any(one is not None and is_running(one) for one in lost.values()), 10)  # noqa: B023
                fleet.settle()
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 10, 60, lambda: fleet.log)
        assert load.wrong == []
        require_clean(fleet)
    finally:
        fleet.delete()


@pytest.mark.full
def test_ctrl_c_in_the_middle_of_a_change_leaves_the_change_to_the_controller(fleet: Fleet) -> None:
    with Load(fleet.status.url) as load:
        command = subprocess.Popen(
            [*PROGRAM, "fleet", "scale", NAME, "decode=3"], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        until(lambda: any(one.name == "decode-2" for one in ledger_of(NAME).history()), 60, lambda: fleet.log)
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does
        _, said = command.communicate(timeout=30)
        assert (command.returncode, f"{NAME} goes on without being watched" in said) == (130, True), said
        until(lambda: fleet.status.settled and len(fleet.names("decode")) == 3, 120, lambda: fleet.log)
    assert load.wrong == []


@pytest.mark.full
def test_a_rank_that_hangs_is_noticed_and_its_instance_replaced(
    tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step ends without it. Until that is noticed, decode does both."""
    use_state_in(tmp_path, monkeypatch)
    fleet = Fleet(tmp_path, NAME)
    try:
        fleet.apply(spec.replace("[role.prefill]", "[role.prefill]\ntensor_parallel_size = 2"))
        before = fleet.pid("prefill-0")
        (rank,) = (one for one in psutil.Process(before).children() if "rank_start" in " ".join(one.cmdline()))
        with Load(fleet.status.url) as load:
            rank.suspend()
            until(lambda: fleet.pid("prefill-0") != before, 150, lambda: fleet.log)
            fleet.settle()
            assert not rank.is_running()
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 5, 60, lambda: fleet.log)
        assert load.wrong == []
        require_clean(fleet)
    finally:
        fleet.delete()


def _signal(pid: int | None, number: int) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
