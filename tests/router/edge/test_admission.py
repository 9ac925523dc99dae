"""How much of request bodies may be held."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from kvferry.core.errors import QueueFull
from kvferry.router.edge.admission import Admission, Slot


def test_bodies_that_are_not_whole_are_bounded_for_each_client() -> None:
    admission = Admission(100)
    with ExitStack() as stack:
        begun = [stack.enter_context(closing(Slot(admission, "a"))) for _ in range(3)]
        begun[0].grow(30)
        begun[1].grow(20)
        with pytest.raises(QueueFull, match="this client has too many bytes"):
            begun[2].grow(1)
        other = stack.enter_context(closing(Slot(admission, "b")))
        other.grow(40)
        begun[0].mark_complete()  # it still takes its bytes, but waits for nothing
        begun[2].grow(10)
        with pytest.raises(QueueFull, match="request bodies in the router use all"):
            other.grow(1)
    admission.check()
    assert not admission.unfinished


def test_the_longest_body_is_admitted_however_little_may_be_held() -> None:
    admission = Admission(100, min_unfinished_bytes=100)
    with closing(Slot(admission, "a")) as slot:
        slot.grow(100)
    admission.check()


def test_a_body_that_came_at_once_counts_towards_the_whole_only() -> None:
    admission = Admission(100)
    with closing(Slot(admission, "a")) as slot, closing(Slot(admission, "a")) as other:
        slot.take(90)  # more than one client may have unfinished
        with pytest.raises(QueueFull, match="request bodies in the router use all"):
            other.take(11)
        assert not admission.unfinished
    admission.check()
