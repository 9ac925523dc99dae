"""Traces of a router's requests: in the order of their arrival, each once it has ended."""

from __future__ import annotations

import io

from kvferry.cli.client.record import Recorder
from kvferry.core.messages.traffic import RequestObservation, TrafficReport
from kvferry.sim.traffic import COLUMNS


def report(*requests: RequestObservation) -> TrafficReport:
    return TrafficReport(now=0.0, num_arrived=0, num_waiting=0, requests=[*requests])


def request(arrived: float, state: str = "done", tokens: int = 10, output: float = 4.0) -> RequestObservation:
    return RequestObservation(arrived, tokens, tokens, state, output_tokens=output)  # type: ignore[arg-type]


def rows(output: io.StringIO) -> list[str]:
    return output.getvalue().splitlines()


def test_a_request_is_written_once_those_before_it_have_ended() -> None:
    output = io.StringIO()
    recorder = Recorder(output)
    recorder.take(report(request(1.0), request(2.0, "running"), request(3.0)))
    assert recorder.num_written == 1
    recorder.take(report(request(1.0), request(2.0), request(3.0)))
    recorder.take(report(request(1.0), request(2.0), request(3.0)))
    assert recorder.num_written == 3
    assert rows(output) == [
        ",".join(COLUMNS),
        "1970-01-01 00:00:01.000000+00:00,10,5",
        "1970-01-01 00:00:02.000000+00:00,10,5",
        "1970-01-01 00:00:03.000000+00:00,10,5",
    ]


def test_failed_requests_and_those_before_the_start_are_left_out() -> None:
    output = io.StringIO()
    recorder = Recorder(output)
    recorder.since = 2.0
    recorder.take(report(request(1.0), request(2.0, "failed"), request(3.0, tokens=0, output=0.2)))
    assert rows(output)[1:] == ["1970-01-01 00:00:03.000000+00:00,1,1"]


def test_at_the_end_what_has_ended_is_written() -> None:
    output = io.StringIO()
    recorder = Recorder(output)
    recorder.take(report(request(1.0, "running"), request(2.0)))
    assert rows(output) == []
    recorder.finish()
    assert len(rows(output)) == 2
    recorder.finish()
    assert recorder.num_written == 1
