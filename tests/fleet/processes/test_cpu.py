"""Cores are shared out so that no two engines meet on one, as far as there are enough."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.processes.cpu import CorePlan, cores_of, num_threads, parse_cores, plan_cores, thread_variables


@pytest.mark.parametrize(
    ("available", "num_instances", "plan"),
    [
        ([0, 1, 2, 3], 2, CorePlan(((0, 1), (2, 3)), (0, 1))),
        ([0, 1, 2, 3, 4], 2, CorePlan(((0, 1, 2), (3, 4)), (0, 1, 2))),
        ([0, 1, 2, 3, 6], 3, CorePlan(((0, 1), (2, 3), (6,)), (0, 1))),
        ([4, 7], 2, CorePlan(((4,), (7,)), (4,))),
        ([4, 7], 3, CorePlan(((4,), (7,), (4,)), (7,))),
        ([5], 4, CorePlan(((5,),) * 4, (5,))),
        ([0, 1], 1, CorePlan(((0, 1),), (0, 1))),
    ],
)
def test_plans(available: list[int], num_instances: int, plan: CorePlan) -> None:
    assert plan_cores(available, num_instances) == plan


@pytest.mark.parametrize("num_cores", range(1, 20))
@pytest.mark.parametrize("num_instances", range(1, 8))
def test_sets_are_disjoint_and_cover_all_when_there_are_enough(num_cores: int, num_instances: int) -> None:
    plan = plan_cores(range(num_cores), num_instances)
    used = [core for cores in plan.instances for core in cores]
    assert all(plan.instances)
    assert set(plan.router) <= set(range(num_cores))
    if num_cores >= num_instances:
        assert sorted(used) == list(range(num_cores))
        assert max(map(len, plan.instances)) - min(map(len, plan.instances)) <= 1


@pytest.mark.parametrize("num_cores", [1, 2, 5])
@pytest.mark.parametrize("num_instances", range(1, 6))
def test_each_number_has_its_set_and_those_beyond_share(num_cores: int, num_instances: int) -> None:
    sets = plan_cores(range(num_cores), num_instances).instances
    assert tuple(cores_of(number, num_instances, range(num_cores)) for number in range(num_instances)) == sets
    assert cores_of(num_instances, num_instances, range(num_cores)) == sets[0]  # such as one that a roll adds
    assert cores_of(0, 0, range(num_cores)) == tuple(range(num_cores))


def test_cores_as_written() -> None:
    assert parse_cores("0-2, 5", range(8)) == (0, 1, 2, 5)
    assert parse_cores("3,3", range(8)) == (3,)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "2-1", "0,99"])
def test_cores_wrongly_written(text: str) -> None:
    with pytest.raises(ConfigError, match="--cores"):
        parse_cores(text, range(8))


def test_an_empty_range_is_named() -> None:
    with pytest.raises(ConfigError, match="'3-1' is an empty range; write the lower number first"):
        parse_cores("0, 3-1", range(8))
    with pytest.raises(ConfigError, match="core 99 cannot be used; this process may use 0, 1"):
        parse_cores("0,99", range(2))


def test_threads_follow_cores() -> None:
    assert thread_variables(3)["OMP_NUM_THREADS"] == "3"
    assert thread_variables(0)["MKL_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("cores", "fleet_cores", "num_cpus", "expected"),
    [(32, 64, 64, 32), (32, 64, 8, 4), (32, 64, 1, 1), (4, 4, 8, 4), (0, 0, 4, 1), (1, 2, 2, 1)],
)
def test_threads_are_a_share_of_what_a_container_may_use(
    cores: int, fleet_cores: int, num_cpus: int, expected: int
) -> None:
    assert num_threads(tuple(range(cores)), tuple(range(fleet_cores)), num_cpus) == expected
