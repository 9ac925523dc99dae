"""Stop strings across chunks: nothing of one leaks, nothing else is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.server.assembly import SendableText, StopStrings
from support.examples import examples


def test_text_without_stop_strings_passes_at_once() -> None:
    assert StopStrings(()).feed("anything") == SendableText("anything")


def test_only_a_possible_beginning_is_held_back() -> None:
    stops = StopStrings(["END"])
    assert stops.feed("abcE") == SendableText("abc")
    assert stops.feed("x") == SendableText("Ex")
    assert stops.feed("yEN") == SendableText("y")
    assert stops.flush() == "EN"
    assert stops.flush() == ""


def test_a_match_over_chunks_ends_the_text_before_it() -> None:
    stops = StopStrings(["END"])
    assert stops.feed("abE") == SendableText("ab")
    assert stops.feed("N") == SendableText("")
    assert stops.feed("Dxyz") == SendableText("", "END")


def test_a_match_can_stay_in_the_text() -> None:
    stops = StopStrings(["END"], include=True)
    assert stops.feed("abEN") == SendableText("ab")
    assert stops.feed("Dxyz") == SendableText("END", "END")


def test_the_one_complete_first_counts() -> None:
    assert StopStrings(["bcde", "cd"]).feed("abcdef") == SendableText("ab", "cd")
    assert StopStrings(["x", "b"]).feed("abx") == SendableText("a", "b")


def test_overlapping_beginnings() -> None:
    stops = StopStrings(["aab"])
    assert stops.feed("aaa") == SendableText("a")
    assert stops.feed("b") == SendableText("", "aab")


def test_before_it_may_stop_a_match_is_text_but_a_beginning_is_kept() -> None:
    stops = StopStrings(["END"])
    assert stops.feed("xENDyE", may_stop=False) == SendableText("xENDy")
    assert stops.feed("ND") == SendableText("", "END")


@settings(max_examples=examples(500), deadline=None)
@given(
    chunks=st.lists(st.text("ab", max_size=4), max_size=12),
    stop_list=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_chunks_or_letters_or_the_whole_give_the_same(chunks: list[str], stop_list: list[str]) -> None:
    text = "".join(chunks)

    def run(parts: list[str]) -> tuple[str, bool]:
        stops, sent = StopStrings(stop_list), ""
        for part in parts:
            passed = stops.feed(part)
            sent += passed.text
            if passed.stop is not None:
                return sent, True
        return sent + stops.flush(), False

    ends = [(text.index(stop) + len(stop), stop) for stop in stop_list if stop in text]
    if ends:
        end, stop = min(ends, key=lambda found: found[0])
        text = text[: end - len(stop)]
    assert run(chunks) == run(list("".join(chunks))) == run(["".join(chunks)]) == (text, bool(ends))
