"""How a request is taken apart, by numbers alone: what a consumer needs of a window, its producer has announced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.api import Failed, Loaded, Released
from kvferry.core.errors import PeerLost
from kvferry.core.messages.hand_off import Consume, Produce, Ticket

pytestmark = pytest.mark.vllm

BLOCK = 4


def partition(*windows: int | None) -> Any:
    from kvferry.adapters.vllm.sections import Partition

    return Partition(windows, BLOCK)


def view_of(num_tokens: int, hand_off: Any) -> Any:
    tokens = list(range(100, 100 + num_tokens))
    return SimpleNamespace(request_id="r", prompt_token_ids=tokens, salt="", hand_off=hand_off, prefill_result=None)


def test_one_group_is_the_request_itself() -> None:
    view = view_of(10, Produce("t"))
    [section] = partition(None).sections(view)
    assert section.view is view
    assert section.blocks([[3, 4, 5]]) == [3, 4, 5]
    assert section.num_tokens_within(7) == 7
    assert partition(None).request_ids("r") == ["r"]


def test_the_main_section_comes_first_and_has_the_ticket() -> None:
    whole, windowed = partition(6, None).sections(view_of(20, Produce("t")))
    assert (whole.group, windowed.group) == (1, 0)
    assert whole.view.hand_off == Produce("t")
    assert windowed.view.hand_off.transfer_id not in ("t", "")
    assert partition(6, None).request_ids("r") == [whole.view.request_id, windowed.view.request_id]
    assert whole.view.finish_reason is None, "it is not kept for another turn"


@given(
    num_tokens=st.integers(1, 60),
    window=st.integers(2, 30),
    num_cached=st.integers(0, 15),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_what_is_needed_was_announced(num_tokens: int, window: int, num_cached: int, chunks: list[int]) -> None:
    groups = partition(window, None)
    produced = groups.sections(view_of(num_tokens, Produce("t")))
    ticket = Ticket(transfer_id="t", remote_num_tokens=len(produced[0].view.prompt_token_ids))
    consumed = groups.sections(view_of(num_tokens, Consume(ticket)))
    tables = [list(range(1, 20)), list(range(101, 120))]
    for ours, theirs in zip(produced, consumed, strict=True):
        assert ours.view.prompt_token_ids == theirs.view.prompt_token_ids
        assert ours.blocks(tables) == theirs.blocks(tables)
        hand_off = theirs.view.hand_off
        assert isinstance(hand_off, Consume)
        assert hand_off.ticket.transfer_id == ours.view.hand_off.transfer_id
        assert hand_off.ticket.remote_num_tokens == len(theirs.view.prompt_token_ids)
    windowed = next(section for section in consumed if section.is_window)
    first_needed = max(0, max(num_tokens - 1, 1) - window + 1)
    assert tables[0].index(windowed.blocks(tables)[0]) == first_needed // BLOCK
    start, step = min(num_cached * BLOCK, num_tokens - 1), 0
    while start < num_tokens:
        count = min(chunks[step % len(chunks)], num_tokens - start)
        for section in produced:
            chunk = section.chunk(start, count, lambda name: tables, "r")
            assert list(chunk.block_ids) == section.blocks(tables)
            complete = chunk.start + chunk.num_tokens >= len(section.view.prompt_token_ids)
            assert complete == (start + count == num_tokens)
        start, step = start + count, step + 1


def test_a_ticket_of_a_prefix_has_its_window_there() -> None:
    ticket = Ticket(transfer_id="t", remote_num_tokens=21)
    whole, windowed = partition(None, 6).sections(view_of(50, Consume(ticket)))
    assert whole.view.prompt_token_ids == list(range(100, 149))
    assert windowed.blocks([[], list(range(20))])[0] == 4, "tokens 16 to 20 are in the window of token 21"
    assert windowed.view.hand_off.ticket.remote_num_tokens == 5
    assert (windowed.num_tokens_within(8), windowed.num_tokens_within(21)) == (0, 5)


def test_reports_are_distinguished() -> None:
    from kvferry.adapters.vllm.sections import by_group

    error = PeerLost("gone")
    report = [Loaded("a#0"), Loaded("a#1", 3), Failed("d#1", error), Loaded("b#c#0"), Released("e#0")]
    assert by_group(report) == {
        0: [Loaded("a"), Loaded("b#c"), Released("e")],
        1: [Loaded("a", 3), Failed("d", error)],
    }
