"""A fleet with [scale] under a load that rises and falls: an instance changes its role, and what is not needed any more
drains. Every request is answered, and rightly, token for token."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvferry.core.messages.traffic import TrafficReport
from kvferry.fleet.places import ledger_of
from support.fleets import Fleet, use_state_in
from support.processes import OPERATOR
from support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.full]

NAME = "scaling"
SPEC = """
name = "{name}"
model = "kvferry/tiny-python"
mode = "pooling"
served_model_name = ["m"]
grace_s = 5
[engine]
kv_cache_memory = "64MiB"
prefix_caching = false
[role.prefill]
count = 1
min = 1
can_be = ["decode"]
[role.decode]
count = 2
min = 1
can_be = ["prefill"]
[router]
port = 0
count = 2
disaggregate_from = "0"
[failure]
hang = "20s"
drain = "30s"
[scale]
ttft = "{ttft}"
itl = "10s"
attainment = 0.9
budget = 3
interval = "1s"
cool_down = "{cool_down}"
hold = "15s"
warm = "0s"
starts = "3s"
"""
LAX_S = 3600.0
"""A target for TTFT that is kept by any instance."""
PROMPTS = [[one % 90 + 3 for one in range(begin, begin + 400)] for begin in (0, 7, 20, 50)]


class Clients:
    """Ask at a rate that a test sets, and compare what they get."""

    def __init__(self, url: str) -> None:
        self._url, self.rate = url, 1.0
        self.wrong: list[str] = []
        self.num_answers = 0
        self.expected = [self._ask(prompt) for prompt in PROMPTS]
        self._asking: list[threading.Thread] = []
        self._ending = threading.Event()
        self._clock = threading.Thread(target=self._run)

    def _ask(self, prompt: list[int]) -> list[int]:
        body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
        found: list[int] = []
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        found += choice.get("token_ids") or []
        return found

    def _check(self, which: int) -> None:
        try:
            found: Any = self._ask(PROMPTS[which])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
            found = repr(error)
        self.num_answers += 1
        if found != self.expected[which]:
            self.wrong.append(f"{found} for prompt {which}")

    def _run(self) -> None:
        rng = random.Random(1)
        while not self._ending.is_set():
            self._asking.append(threading.Thread(target=self._check, args=(rng.randrange(len(PROMPTS)),)))
            self._asking[-1].start()
            time.sleep(rng.expovariate(self.rate))

    def __enter__(self) -> Clients:
        self._clock.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._clock.join()
        for one in self._asking:
            one.join(90)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Not begun yet."""
    use_state_in(tmp_path, monkeypatch)
    made = Fleet(tmp_path, NAME)
    try:
        yield made
    finally:
        made.delete()


def spec(ttft_s: float, cool_down_s: float) -> str:
    return SPEC.format(name=NAME, ttft=f"{ttft_s:.3f}s", cool_down=f"{cool_down_s:g}s")


def told() -> list[str]:
    return [f"{one.what} {one.name}: {one.reason}" for one in ledger_of(NAME).history()]


def decided() -> list[str]:
    return [one.name for one in ledger_of(NAME).history() if one.what == "scale"]


def ready(fleet: Fleet) -> dict[str, int]:
    return {role: one.ready for role, one in fleet.status.roles.items() if role != "router"}


def traffic(url: str) -> TrafficReport:
    answer = httpx.get(f"{url}/kvferry/traffic", auth=OPERATOR)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=TrafficReport)


def test_instances_follow_what_is_needed_and_every_answer_is_right(fleet: Fleet) -> None:
    """What is decided when is tested elsewhere, without a machine that has other things to do at the same time: here
    the load rises until one prefill instance is too few, and the target is lax where one is to be enough."""
    fleet.apply(spec(ttft_s=LAX_S, cool_down_s=600.0))
    with Clients(fleet.status.url) as clients:
        clients.rate = 4.0
        until(lambda: clients.num_answers >= 25, 60)
        report = traffic(fleet.status.url)
        assert report.num_arrived >= len(report.requests) > 20
        took_s = statistics.median(one.prefill_s for one in report.requests if one.prefill_s)
        assert not decided(), told()
        clients.rate = 0.7 / took_s
        fleet.apply(spec(ttft_s=3.0 * took_s, cool_down_s=6.0))
        until(lambda: is_moved(fleet, clients, most=3.0 / took_s), 100, str(told()))
        clients.rate = 2.0
        fleet.apply(spec(ttft_s=LAX_S, cool_down_s=6.0))
        until(lambda: ready(fleet) == {"prefill": 1, "decode": 1}, 100, str(told()))
    assert decided()[-1] == "release"
    assert not clients.wrong, clients.wrong[:3]
    assert "requests/s" in str(told())


def is_moved(fleet: Fleet, clients: Clients, most: float) -> bool:
    """Whether a decode instance has become one for prefill; if not, more is asked for."""
    clients.rate = min(1.005 * clients.rate, most)
    return ready(fleet) == {"prefill": 2, "decode": 1}
