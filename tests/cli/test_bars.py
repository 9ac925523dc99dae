"""Progress of commands in a pipe."""

from __future__ import annotations

import io

from kvferry.cli.bars import ProgressLines
from kvferry.cli.fleet.life import waiting_text


class _Clock:
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def test_a_pipe_gets_a_line_now_and_then() -> None:
    clock, stream = _Clock(), io.StringIO()
    report = ProgressLines("measuring", clock, stream)  # type: ignore[arg-type]
    for second in range(13):
        clock.now = 100.0 + second
        report(second / 20)
    report(0.9, "stores")
    clock.now = 120.0
    report(1.0)
    assert stream.getvalue().splitlines() == [
        "kvferry: measuring: 25 %",
        "kvferry: measuring: 50 %",
        "kvferry: stores: 100 %",
    ]


def test_a_command_names_the_members_that_it_waits_for() -> None:
    assert waiting_text(["prefill-0", "decode-0"]) == "waiting for prefill-0, decode-0 to start"
    assert waiting_text([f"decode-{number}" for number in range(6)]).endswith("decode-3 and 2 more to start")
    assert waiting_text([]) == "waiting for the fleet's controller"
