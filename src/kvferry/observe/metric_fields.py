"""Metrics as fields of the statistics dataclasses that count them, with their Prometheus names.

```python
@dataclass
class QueueStatistics:
    num_waiting: int = gauge("vllm:num_requests_waiting", "Requests that wait.")
    num_rejected: int = counter("kvferry:requests_rejected", "Requests refused because the queue was full.")
```

`metrics_of` finds them, also in nested dataclasses. Names are vLLM's if vLLM has a metric of the same
meaning; all others begin with `kvferry:`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[[Any], Any])
_KEY = "figure"


@dataclass(frozen=True)
class MetricSpec:
    """One metric. `label`: the metric's value is a dictionary from this label's values to numbers; empty: a number."""

    name: str
    documentation: str
    is_counter: bool
    label: str = ""


def gauge(name: str, documentation: str) -> Any:
    """A dataclass field that is a gauge and begins at 0."""
    return field(default=0, metadata={_KEY: MetricSpec(name, documentation, is_counter=False)})


def counter(name: str, documentation: str) -> Any:
    """A dataclass field that is a counter and begins at 0. Prometheus adds `_total` to the name."""
    return field(default=0, metadata={_KEY: MetricSpec(name, documentation, is_counter=True)})


def counter_by(label: str, name: str, documentation: str) -> Any:
    """A dataclass field that is a dictionary of counters by the value of `label`, and begins empty."""
    return field(default_factory=dict, metadata={_KEY: MetricSpec(name, documentation, is_counter=True, label=label)})


def computed_gauge(name: str, documentation: str, label: str = "") -> Callable[[Method], Method]:
    """Decorator for a method of the dataclass whose result is a gauge."""

    def mark(method: Method) -> Method:
        setattr(method, _KEY, MetricSpec(name, documentation, is_counter=False, label=label))
        return method

    return mark


def metrics_of(statistics: Any) -> Iterator[tuple[MetricSpec, Any]]:
    """Every metric of a statistics object, with its current value; also of nested dataclasses."""
    for field_info in fields(statistics):
        value = getattr(statistics, field_info.name)
        if _KEY in field_info.metadata:
            yield field_info.metadata[_KEY], value
        elif is_dataclass(value):
            yield from metrics_of(value)
    for method in vars(type(statistics)).values():
        if isinstance(figure := getattr(method, _KEY, None), MetricSpec):
            yield figure, method(statistics)


def split_metric_name(name: str) -> tuple[str, str]:
    """Split a name of a connector's statistics into metric and kind: `failed_LeaseEnded` is `failed` of kind
    `LeaseEnded`, and `taken_bytes_shm` is `taken_bytes` of kind `shm`."""
    match = re.fullmatch(r"(\w+)_([A-Z]\w*)|(\w+_(?:bytes|seconds))_(.+)", name)
    if match is None:
        return name, ""
    return match[1] or match[3], match[2] or match[4]
