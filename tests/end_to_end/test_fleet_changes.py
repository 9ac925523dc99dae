"""A fleet that is changed while it serves: scaled, rolled, its instances given other roles, killed and stopped, and its
controller killed. Every request is answered, and rightly, token for token; in the end nothing is kept.

`KVFERRY_FAULTS` says how many changes at random (more in CI, thousands in `make soak`), `KVFERRY_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import ModelMaker
from kvferry.fleet.control.ledger import FleetStatus
from kvferry.fleet.places import ledger_of, running_folder
from support.processes import AUTH_TOKEN, OPERATOR, run, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

NUM_CHANGES = int(os.environ.get("KVFERRY_FAULTS", "12"))
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
NAME = "changing"
SIZES = ((0, 9), (7, 70), (20, 150), (50, 33))
PROMPTS: list[list[int]] = [[one % 90 + 3 for one in range(begin, begin + size)] for begin, size in SIZES]


SPEC = """
name = "{name}"
model = "{model}"
mode = "pooling"
args = ["--served-model-name=m", "--grace-s=5"]
[engine]
args = ["--dtype=float32", "--kv-cache-memory=32MiB"]
[role.prefill]
count = 1
max = 3
can_be = ["decode"]
[role.decode]
count = 1
max = 3
can_be = ["prefill"]
[router]
port = 0
count = 2
args = ["--disaggregate-from=0"]
[failure]
backoff = ["100ms", "1s"]
crash_loop = 100
hang = "3s"
drain = "30s"
"""


class Fleet:
    """The commands that change it, and what its ledger says."""

    def __init__(self, folder: Path, name: str, model: Path | str) -> None:
        self.folder, self.name, self.model = folder, name, model

    def apply(self, **changes: str) -> None:
        text = SPEC.format(name=self.name, model=self.model)
        for before, after in changes.items():
            text = text.replace(before, after)
        path = self.folder / "spec.toml"
        path.write_text(text)
        self.does("apply", str(path))

    def does(self, *command: str) -> None:
        done = run("fleet", *command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.log}"

    @property
    def status(self) -> FleetStatus:
        found = ledger_of(self.name).status()
        assert found is not None
        return found

    @property
    def log(self) -> str:
        path = ledger_of(self.name).folder / "controller.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def pid(self, member: str) -> int | None:
        with suppress(OSError, ValueError):
            return int((running_folder(ledger_of(self.name)) / "members" / member / "process").read_text().split()[0])
        return None

    def names(self, *roles: str) -> list[str]:
        status = ledger_of(self.name).status()  # None: no controller has looked yet
        members = () if status is None else status.members
        return [one.name for one in members if one.role in roles and one.phase == "ready"]

    def settle(self) -> None:
        """As `kvferry fleet resume`, which also starts a controller where there is none."""
        self.does("resume", self.name)
        until(lambda: self.status.settled, 240, self.log)


class Load:
    """Clients that ask without a pause, and compare."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.num_answers = 0
        self._expected = [self._ask(prompt) for prompt in PROMPTS]
        self._ending = threading.Event()
        self._clients = [threading.Thread(target=self._keep_asking, args=(number,)) for number in range(2)]

    def _ask(self, prompt: list[int]) -> list[int]:
        body = {"model": "m", "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def _keep_asking(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._ending.is_set():
            which = dice.randrange(len(PROMPTS))
            try:
                found: Any = self._ask(PROMPTS[which])
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
                found = repr(error)
            self.num_answers += 1
            if found != self._expected[which]:
                self.wrong.append(f"{found} for prompt {which}")
            time.sleep(0.02)  # the instances are to have their cores

    def __enter__(self) -> Load:
        for one in self._clients:
            one.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        for one in self._clients:
            one.join()


@pytest.fixture
def fleet(tmp_path: Path, model_maker: ModelMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", AUTH_TOKEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Fleet(tmp_path, NAME, model_maker("llama"))
    try:
        made.apply()
        yield made
    finally:
        run("fleet", "delete", NAME)
    assert not running_folder(ledger_of(NAME)).joinpath("members").exists() or not list(
        running_folder(ledger_of(NAME)).joinpath("members").iterdir()
    )


def require_clean(fleet: Fleet) -> None:
    """Nothing is kept on any instance, once nobody asks any more."""
    for one in fleet.status.members:
        if one.role != "router":
            until(
                lambda url=one.url: httpx.get(f"{url}/kvferry/check", auth=OPERATOR, timeout=30).status_code == 200,  # type: ignore[misc]
                30,
                fleet.log,
            )


@pytest.mark.full
def test_a_fleet_grows_shrinks_and_is_rolled_and_no_request_notices(fleet: Fleet) -> None:
    with Load(fleet.status.url) as load:
        fleet.does("scale", NAME, "prefill=2", "decode=2")
        assert [len(fleet.names(role)) for role in ("prefill", "decode")] == [2, 2]
        fleet.does("scale", NAME, "prefill=1", "decode=3")  # by a change of role
        assert sorted(fleet.names("decode", "prefill")) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        fleet.does("scale", NAME, "decode=1")
        before = {one.revision for one in fleet.status.members}
        fleet.does("roll", NAME)
        assert before.isdisjoint(one.revision for one in fleet.status.members)
    assert load.wrong == []
    assert load.num_answers > 10
    require_clean(fleet)


@pytest.mark.full
def test_a_change_of_settings_rolls_and_can_be_rolled_back(fleet: Fleet) -> None:
    revision = fleet.status.members[0].revision
    with Load(fleet.status.url) as load:
        fleet.apply(**{"--kv-cache-memory=32MiB": "--kv-cache-memory=48MiB"})
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
        fleet.does("scale", NAME, f"prefill={dice.randint(1, 2)}", f"decode={dice.randint(1, 2)}", "--wait-s=0")

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
