"""Metrics declared where they are counted: a field of a statistics dataclass, with its Prometheus name beside it.

```python
@dataclass
class QueueStatistics:
    num_waiting: int = gauge("vllm:num_requests_waiting", "Requests that wait.")
    num_rejected: int = counter("kvferry:requests_rejected", "Requests refused because the queue was full.")
```

`figures_of` finds them, also in dataclasses within dataclasses. Names are vLLM's if vLLM has a metric of the same
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
class Figure:
    """One metric. `label`: the value is a dictionary from this label's values to numbers; empty: it is a number."""

    name: str
    documentation: str
    is_counter: bool
    label: str = ""


def gauge(name: str, documentation: str) -> Any:
    """A dataclass field that is a gauge and begins at 0."""
    return field(default=0, metadata={_KEY: Figure(name, documentation, is_counter=False)})


def counter(name: str, documentation: str) -> Any:
    """A dataclass field that is a counter and begins at 0. Prometheus adds `_total` to the name."""
    return field(default=0, metadata={_KEY: Figure(name, documentation, is_counter=True)})


def counter_by(label: str, name: str, documentation: str) -> Any:
    """A dataclass field that is a dictionary of counters by the value of `label`, and begins empty."""
    return field(default_factory=dict, metadata={_KEY: Figure(name, documentation, is_counter=True, label=label)})


def computed_gauge(name: str, documentation: str, label: str = "") -> Callable[[Method], Method]:
    """Decorator for a method of the dataclass whose result is a gauge."""

    def mark(method: Method) -> Method:
        setattr(method, _KEY, Figure(name, documentation, is_counter=False, label=label))
        return method

    return mark


def figures_of(statistics: Any) -> Iterator[tuple[Figure, Any]]:
    """Every metric of a statistics object with its current value, including those of dataclasses in its fields."""
    for one in fields(statistics):
        value = getattr(statistics, one.name)
        if _KEY in one.metadata:
            yield one.metadata[_KEY], value
        elif is_dataclass(value):
            yield from figures_of(value)
    for method in vars(type(statistics)).values():
        if isinstance(figure := getattr(method, _KEY, None), Figure):
            yield figure, method(statistics)


def split_figure(figure: str) -> tuple[str, str]:
    """The metric and the kind in a name of a connector's statistics: `failed_LeaseEnded` is `failed` of kind
    `LeaseEnded`, and `taken_bytes_shm` is `taken_bytes` of kind `shm`."""
    found = re.fullmatch(r"(\w+)_([A-Z]\w*)|(\w+_(?:bytes|seconds))_(.+)", figure)
    if found is None:
        return figure, ""
    return found[1] or found[3], found[2] or found[4]
