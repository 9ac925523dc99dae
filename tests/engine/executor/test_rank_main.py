"""What a rank other than rank 0 does between its commands. Its process is tested with the engine's."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engine.executor.messages import Check, Ping, Pong, Proceed
from kvferry.engine.executor.rank_main import Inbox, _Woken


@pytest.mark.parametrize(("answer", "may_proceed"), [(Proceed(), True), (Check(), False)])
def test_a_transfer_that_moves_on_while_a_failed_rank_waits_is_asked_for_afterwards(
    answer: Any, *, may_proceed: bool
) -> None:
    commands: SimpleQueue[Any] = SimpleQueue()
    pipe: Any = SimpleNamespace(receive=commands.get)
    inbox = Inbox(pipe)
    inbox.wake()
    commands.put(answer)
    assert inbox.wait_for_proceed(5) is may_proceed
    assert isinstance(inbox.take(5), _Woken)


def test_a_rank_says_that_it_runs_also_while_it_carries_out_a_command() -> None:
    said: SimpleQueue[Any] = SimpleQueue()
    told: SimpleQueue[Any] = SimpleQueue()
    pipe: Any = SimpleNamespace(receive=told.get, send=said.put)
    inbox = Inbox(pipe)  # nobody takes what it is told
    told.put(Check())
    told.put(Ping())
    assert said.get(timeout=10) == Pong()
    assert inbox.take(10) == Check()
