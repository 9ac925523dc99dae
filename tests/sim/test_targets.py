from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.sim.targets import Targets, parse_targets


def test_targets_are_read_and_written() -> None:
    assert parse_targets("ttft=2s, itl=50ms") == Targets(ttft=2.0, itl=0.05)
    assert str(parse_targets("e2e=1m,ttft=500ms")) == "ttft=500ms,e2e=60s"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tfft=2s", "did you mean 'ttft'"),
        ("ttft", "ttft has no value"),
        ("ttft=2", "'2' is not a duration"),
        ("ttft=2s,ttft=3s", "twice"),
        ("ttft=2s,itl=0ms", "--slo: itl must be more than 0"),
        ("", "known: ttft, itl, e2e"),
    ],
)
def test_what_is_wrong_with_targets(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_targets(text)


def test_a_request_meets_all_targets_or_not() -> None:
    targets = Targets(ttft=1.0, itl=0.1)
    assert targets.met_by(1.0, 2.0, 11)
    assert not targets.met_by(1.1, 2.0, 11)
    assert not targets.met_by(1.0, 2.1, 11)
    assert targets.met_by(1.0, 1.0, 1)  # of one token: there is nothing between two
    assert Targets().met_by(1e6, 1e6, 5)
    assert not Targets(e2e=1.0).met_by(0.5, 1.5, 2)
