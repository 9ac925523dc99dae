"""Metrics declared where they are counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvferry.observe.metric_fields import (
    computed_gauge,
    counter,
    counter_by,
    gauge,
    metrics_of,
    split_metric_name,
)


@dataclass
class Inner:
    num_waiting: int = gauge("vllm:num_requests_waiting", "Waiting.")


@dataclass
class Outer:
    num_done: int = counter("kvferry:done", "Done.")
    by_reason: dict[str, int] = counter_by("reason", "kvferry:failed", "Failed.")
    inner: Inner = field(default_factory=Inner)
    note: str = "no metric"

    @computed_gauge("kvferry:double", "Twice.")
    def double(self) -> int:
        return 2 * self.num_done


def test_all_metrics_are_found_with_their_values() -> None:
    statistics = Outer(num_done=3, inner=Inner(4))
    statistics.by_reason["late"] = 1
    found = {spec.name: (value, spec.is_counter, spec.label) for spec, value in metrics_of(statistics)}
    assert found == {
        "kvferry:done": (3, True, ""),
        "kvferry:failed": ({"late": 1}, True, "reason"),
        "vllm:num_requests_waiting": (4, False, ""),
        "kvferry:double": (6, False, ""),
    }


def test_each_object_counts_for_itself() -> None:
    first, second = Outer(), Outer()
    first.by_reason["late"] = 1
    assert second.by_reason == {}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("failed_LeaseEnded", ("failed", "LeaseEnded")),
        ("taken_bytes_shm", ("taken_bytes", "shm")),
        ("wait_seconds_tls-tcp", ("wait_seconds", "tls-tcp")),
        ("num_loading", ("num_loading", "")),
        ("read_bytes", ("read_bytes", "")),
    ],
)
def test_names_of_connectors_are_split_into_metric_and_kind(name: str, parts: tuple[str, str]) -> None:
    assert split_metric_name(name) == parts
