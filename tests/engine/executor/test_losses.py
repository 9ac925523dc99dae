"""Of several losses the cause is told."""

from __future__ import annotations

import threading

import pytest

from kvferry.core.errors import ConfigError, RankLost
from kvferry.engine.executor.rank_process import CONSEQUENCE, Losses


class BriefLosses(Losses):
    cause_s = 0.5


def test_a_cause_that_becomes_known_later_is_told_before_its_consequence() -> None:
    losses = BriefLosses()
    losses.require_none()
    losses.add(CONSEQUENCE, RankLost("rank 2 failed: connection closed by peer"))
    threading.Timer(0.05, lambda: losses.add(0, RankLost("rank 1 was ended by SIGKILL"))).start()
    with pytest.raises(RankLost, match="rank 1 was ended"):
        losses.require_none()


def test_without_a_cause_the_first_consequence_is_told() -> None:
    losses = BriefLosses()
    losses.add(CONSEQUENCE + 1, RankLost("rank 1 ended with exit code 1"))
    losses.add(CONSEQUENCE, RankLost("rank 1 failed: out of memory"))
    with pytest.raises(RankLost, match="out of memory"):
        losses.require_none()


def test_what_broke_here_is_explained_by_a_loss_that_follows() -> None:
    losses = BriefLosses()
    threading.Timer(0.05, lambda: losses.add(1, ConfigError("--block-size is wrong"))).start()
    with pytest.raises(ConfigError, match="--block-size") as caught:
        losses.raise_cause(error=RuntimeError("Connection reset by peer"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_rank_0_alone_stays_its_own() -> None:
    BriefLosses().raise_cause(error=ValueError("a defect"))
    with pytest.raises(RankLost, match="did not take part in time"):
        BriefLosses().raise_cause(error=RuntimeError("Timed out waiting 1000ms for recv"))


def test_everyone_who_waits_is_told() -> None:
    losses, told = BriefLosses(), threading.Event()
    losses.on_loss = told.set
    losses.add(0, RankLost("gone"))
    assert told.is_set()
