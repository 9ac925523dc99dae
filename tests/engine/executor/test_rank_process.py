"""What rank 0 says to a rank that fails in a step, and when. The processes here only hold the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from kvferry.core.errors import RankLost
from kvferry.core.messages.wire import Pipe
from kvferry.engine.executor.messages import Check, Checked, Close, Done, Proceed, RankStep, Statistics, rank_end
from kvferry.engine.executor.rank_process import Losses, RankProcess, start_rank
from kvferry.engine.executor.store import StoreTable

STEP = RankStep(None, [], 0, 0)


class Held(SimpleQueue[Any]):
    """Its producer gets no further, once an answer is there, before the engine has begun the next step."""

    def __init__(self) -> None:
        self.has_begun_step = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.has_begun_step.wait(10)


@pytest.fixture
def answers() -> SimpleQueue[Any] | None:
    """The queue of the rank's answers; None: its own."""
    return None


@pytest.fixture
def rank(answers: SimpleQueue[Any] | None) -> Iterator[tuple[RankProcess, Pipe]]:
    """As rank 0 sees it, and its end of the pipe."""
    ends: list[Pipe] = []

    def start(rank: int, pipe: int, auth_token: str) -> subprocess.Popen[bytes]:
        ends.append(rank_end(os.dup(pipe)))
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    process = RankProcess(1, *start_rank(1, "token", start), Losses(), StoreTable(), answers)
    yield process, ends[0]
    process.request_exit()
    while not isinstance(ends[0].receive(), Close):
        pass
    ends[0].close()
    process.end(0)


def fail(pipe: Pipe, process: RankProcess) -> None:
    """The rank fails in the step that it was told, and rank 0 has heard of it."""
    assert isinstance(pipe.receive(), RankStep)
    pipe.send(Done(b"", 0, "out of cheese"))
    assert process.answer(Done, 10).failure


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_rank_that_failed_proceeds_as_soon_as_rank_0_has_left_the_step(rank: Any, *, leaves_first: bool) -> None:
    process, pipe = rank
    for _ in range(2):
        process.send(STEP)
        if leaves_first:
            process.leave_step()
        fail(pipe, process)
        if not leaves_first:
            process.leave_step()
        assert isinstance(pipe.receive(), Proceed)


def test_a_rank_that_did_not_fail_is_told_nothing_and_a_failure_is_of_its_own_step(rank: Any) -> None:
    process, pipe = rank
    process.send(STEP)
    process.leave_step()
    assert isinstance(pipe.receive(), RankStep)
    pipe.send(Done(b"", 0))
    process.answer(Done, 10)
    process.send(STEP)
    fail(pipe, process)
    process.send(Check())  # rank 0 is still in this step: nothing was said before
    assert isinstance(pipe.receive(), Check)


@pytest.mark.parametrize("answers", [Held()])
def test_a_step_that_begins_as_soon_as_the_answer_is_there_does_not_overtake_proceed(rank: Any, answers: Held) -> None:
    process, pipe = rank
    process.send(STEP)
    process.leave_step()
    fail(pipe, process)
    process.send(STEP)
    answers.has_begun_step.set()
    assert isinstance(pipe.receive(), Proceed)
    assert isinstance(pipe.receive(), RankStep)


def test_an_answer_to_something_else_is_a_lost_rank(rank: Any) -> None:
    process, pipe = rank
    pipe.send(Statistics({}))
    with pytest.raises(RankLost, match="answered Statistics; Checked was expected"):
        process.answer(Checked, 10)


def test_a_rank_knows_the_threads_of_all_and_takes_its_share_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        link, process = start_rank(1, "token")
        try:
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            assert b"OMP_NUM_THREADS=4" in variables, "divided here too, a rank would take a share of a share"
        finally:
            process.kill()
            process.wait(30)
            link.pipe.close()
    finally:
        torch.set_num_threads(before)
