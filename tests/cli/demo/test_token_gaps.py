"""The picture of gaps between tokens."""

from __future__ import annotations

import pytest

from kvferry.cli.demo.token_gaps import Characters, TokenGaps, draw_stalls, verdict

SMOOTH = TokenGaps([index * 0.1 for index in range(10)], [0.25], [0.5])
STALLED = TokenGaps([0.0, 0.1, 0.2, 0.3, 0.7, 0.8, 0.9], [0.3], [0.4])


def test_a_gap_fills_every_column_that_it_reaches_into() -> None:
    stalls = TokenGaps([0.0, 0.5, 3.25, 3.5], [], [])
    assert stalls.longest_gaps_s(6, 1.0) == [2.75, 2.75, 2.75, 2.75, 0.0, 0.0]


BOTH = """\
P/D
  400 ms


         ██████████
           ▲
plain
  400 ms    █████
            █████
            █████
         ██████████
            ▲
         0 s  0.9 s
         ▲ a long prompt arrives"""


@pytest.mark.parametrize(
    ("characters", "picture"), [("blocks", BOTH), ("ascii", BOTH.translate({0x2588: "#", 0x25B2: "^"}))]
)
def test_both_streams_are_drawn_on_the_same_scales(characters: Characters, picture: str) -> None:
    drawn = draw_stalls({"P/D": SMOOTH, "plain": STALLED}, 19, characters)
    assert [line.plain for line in drawn] == picture.splitlines()


def test_the_verdict_is_what_was_measured() -> None:
    text, is_shorter = verdict(SMOOTH, STALLED)
    assert is_shorter
    assert "100 ms on P/D, 400 ms on the plain instance" in text
    text, is_shorter = verdict(STALLED, SMOOTH)
    assert not is_shorter
    assert "400 ms on P/D, 100 ms on the plain instance" in text
    assert "disturbed" in text
