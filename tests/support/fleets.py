"""A fleet as its user has it, by the commands, and clients that ask it without a pause and compare what they get."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.fleet.control.ledger import FleetStatus, MemberStatus
from kvferry.fleet.places import ledger_of, running_folder
from support.processes import AUTH_TOKEN, OPERATOR, run
from support.waiting import until

SIZES = ((0, 9), (7, 70), (20, 150), (50, 33))
PROMPTS: list[list[int]] = [[one % 90 + 3 for one in range(begin, begin + size)] for begin, size in SIZES]

SPEC = """
name = "{name}"
model = "{model}"
mode = "pooling"
served_model_name = ["m"]
grace_s = 5
[engine]
dtype = "float32"
kv_cache_memory = "32MiB"
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
disaggregate_from = "0"
[failure]
backoff = ["100ms", "1s"]
crash_loop = 100
hang = "3s"
drain = "30s"
"""


def use_state_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this process then know no other fleets, and start instances of one thread."""
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(folder / "state"))
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", AUTH_TOKEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Fleet:
    """The commands that change a fleet, and what its ledger says."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._struck: set[str] = set()
        """URLs of instances that tests have struck, whether that has been noticed or not."""

    def apply(self, spec: str, *flags: str) -> None:
        """Make it, or change it to this."""
        path = self.folder / "spec.toml"
        path.write_text(spec)
        self.does("apply", str(path), *flags)

    def does(self, *command: str) -> None:
        """`kvferry fleet …`, which must succeed."""
        done = run("fleet", *command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.log}"

    def scale(self, *counts: str) -> None:
        """Such as `prefill=2`."""
        self.does("scale", self.name, *counts)

    def settle(self) -> None:
        """As `kvferry fleet resume`, which also starts a controller where there is none."""
        self.does("resume", self.name)
        until(lambda: self.status.settled, 240, lambda: self.log)

    def delete(self) -> None:
        """Also of one that has never come up."""
        run("fleet", "delete", self.name)

    @property
    def status(self) -> FleetStatus:
        """As a controller wrote it last."""
        found = ledger_of(self.name).status()
        assert found is not None
        return found

    @property
    def log(self) -> str:
        """The end of its controller's."""
        path = ledger_of(self.name).folder / "controller.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def ready(self, *roles: str) -> list[MemberStatus]:
        """Members of these roles that serve; none before a controller has looked."""
        status = ledger_of(self.name).status()
        return [one for one in status.members if one.role in roles and one.phase == "ready"] if status else []

    def names(self, *roles: str) -> list[str]:
        """Of those that are `ready`."""
        return [one.name for one in self.ready(*roles)]

    def may_strike(self, *members: str) -> bool:
        """Whether an instance is left that can answer if these are struck, which then counts as done: with none,
        requests are answered with 503 until one is there again."""
        here = self.ready("prefill", "decode")
        if not any(one.name not in members and one.url not in self._struck for one in here):
            return False
        self._struck |= {one.url for one in here if one.name in members}
        return True

    def pid(self, member: str) -> int | None:
        """The process of a local member; None if there is none."""
        with suppress(OSError, ValueError):
            return int((running_folder(ledger_of(self.name)) / "members" / member / "process").read_text().split()[0])
        return None


class Load:
    """Clients that ask without a pause, and compare."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.num_answers, self.num_clients = 0, 2
        self.expected = [self._ask(prompt) for prompt in PROMPTS]
        self._ending = threading.Event()
        self._clients = [
            threading.Thread(target=self._keep_asking, args=(number,)) for number in range(self.num_clients)
        ]

    def _ask(self, prompt: list[int]) -> list[int]:
        body = {"model": "m", "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def _keep_asking(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._ending.is_set():
            which = rng.randrange(len(PROMPTS))
            try:
                found: Any = self._ask(PROMPTS[which])
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
                found = repr(error)
            self.num_answers += 1
            if found != self.expected[which]:
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


def require_clean(fleet: Fleet) -> None:
    """Nothing is kept on any instance, once nobody asks any more and those that have just been killed are replaced."""
    until(lambda: all(_is_clean(one) for one in fleet.status.members if one.role != "router"), 90, lambda: fleet.log)


def _is_clean(member: MemberStatus) -> bool:
    try:
        return httpx.get(f"{member.url}/kvferry/check", auth=OPERATOR, timeout=30).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):  # it does not serve yet, or any more
        return False


def change_at_random(
    fleet: Fleet, rng: random.Random, number: int, strike: Callable[[str, int], None], *more: Callable[[], None]
) -> None:
    """So many changes under load, some in the middle of others: counts, rolls, other controllers, whatever `more` does,
    and members that `strike` sends a signal to, but never all instances. Every answer is right, and in the end nothing
    is kept."""

    def struck(number: int) -> None:
        names = fleet.names("prefill", "decode")
        if names and fleet.may_strike(name := rng.choice(names)):
            strike(name, number)

    def kill() -> None:
        struck(signal.SIGKILL)

    def stop() -> None:
        struck(signal.SIGSTOP)

    def scale() -> None:
        fleet.scale(f"prefill={rng.randint(1, 2)}", f"decode={rng.randint(1, 2)}", "--wait-s=0")

    def role() -> None:
        """One becomes the other without a restart, where there is one too many."""
        fleet.scale(*rng.choice([("prefill=1", "decode=2"), ("prefill=2", "decode=1")]), "--wait-s=0")

    def roll() -> None:
        fleet.does("roll", fleet.name, "--wait-s=0")

    def controller() -> None:
        with suppress(ProcessLookupError):
            os.kill(fleet.status.pid, signal.SIGKILL)
        fleet.does("resume", fleet.name, "--wait-s=0")

    changes = [kill, stop, scale, role, roll, controller, *more]
    done: list[str] = []
    with Load(fleet.status.url) as load:
        for _ in range(number):
            change = rng.choice(changes)
            done.append(change.__name__)
            change()
            time.sleep(rng.choice([0.0, 0.2, 1.0]))
            if rng.random() < 0.4:
                fleet.settle()
            assert load.wrong == [], f"{load.wrong} after {done}\n{_told_of(fleet)}"
        fleet.settle()
    assert load.wrong == [], f"{load.wrong} after {done}\n{_told_of(fleet)}"
    require_clean(fleet)


def _told_of(fleet: Fleet) -> str:
    """What a controller has seen last, and has done."""
    members = json.dumps([*map(str, fleet.status.members)], indent=1)
    return "\n".join([members, *map(str, ledger_of(fleet.name).history()), fleet.log])
