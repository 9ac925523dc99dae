"""Numbers of instances, and their ports."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.spec.settings import FleetShapeSettings


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ({}, (False, 0, 0)),
        ({"prefill": 0, "decode": 0}, (False, 0, 0)),
        ({"prefill": 2}, (True, 2, 1)),
        ({"decode": 3}, (True, 1, 3)),
        ({"prefill": 2, "decode": 3}, (True, 2, 3)),
    ],
)
def test_one_count_implies_the_other(counts: dict[str, Any], numbers: tuple[bool, int, int]) -> None:
    spec = FleetShapeSettings(**counts)
    assert (spec.is_split, spec.num_prefill, spec.num_decode) == numbers


def test_ports_follow_one_another() -> None:
    spec = FleetShapeSettings(prefill=1, decode=1, instance_ports=9000)
    assert [spec.instance_port(index) for index in range(2)] == [9000, 9001]
    assert FleetShapeSettings().instance_port(5) == 0
    FleetShapeSettings(prefill=1, decode=1, instance_ports=65534)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"address": "a:1"}, "--address is for --backend ray"),
        ({"prefill": 0, "decode": 2}, "--prefill 0 with --decode 2"),
        ({"prefill": 2, "decode": 0}, "--decode 0 with --prefill 2"),
        ({"prefill": 200, "decode": 100}, "300 instances on this machine; at most 256"),
        ({"prefill": 1, "decode": 1, "instance_ports": 65535}, "the last instance.s port would be"),
        ({"prefill": -1}, "--prefill"),
    ],
)
def test_what_contradicts_itself_names_the_flags(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FleetShapeSettings(**settings)
