"""`[backend.ray]`: what members need of their nodes, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.spec.ray_spec import ActorSpec, read_ray


def test_each_role_has_its_table() -> None:
    table = {"prefill": {"gpus": 2, "resources": {"fast_network": 1}}, "router": {"cpus": 0.5}}
    assert read_ray(table) == {
        "prefill": ActorSpec(gpus=2, resources={"fast_network": 1}),
        "router": ActorSpec(cpus=0.5),
    }
    assert read_ray({}) == {}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"prefil": {}}, "backend.ray.prefil.*prefill"),
        ({"decode": 3}, "backend.ray.decode must be a table"),
        ({"decode": {"gpu": 1}}, "gpus"),
        ({"decode": {"gpus": -1}}, "gpus"),
        ({"decode": {"cpus": 2**21}}, "cpus"),
        ({"decode": {"ranks": "anywhere"}}, "ranks"),
        ({"decode": {"resources": {"x": -1}}}, "resources"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_ray(table)
