"""Metrics declared where they are counted: a field of a statistics dataclass, with its Prometheus name beside it.

```python
@dataclass
class QueueStatistics:
    num_waiting: int = gauge("vllm:num_requests_waiting", "Requests that wait.")
    num_rejected: int = counter("kvferry:requests_rejected", "Requests refused because the queue was full.")
```

`figures_of` finds them, also in dataclasses within dataclasses. A gauge goes up and down, a counter only grows.
Names are vLLM's wherever the meaning is the same; what only kvferry has begins with `kvferry:`.
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
    """One metric. `label`: its value is a dictionary from values of this label to numbers; empty: it is a number."""

    name: str
    documentation: str
    is_counter: bool
    label: str = ""


def gauge(name: str, documentation: str) -> Any:
    """A dataclass field that is a gauge, and begins at 0."""
    return field(default=0, metadata={_KEY: Figure(name, documentation, is_counter=False)})


def counter(name: str, documentation: str) -> Any:
    """A dataclass field that is a counter, and begins at 0. Prometheus adds `_total` to the name."""
    return field(default=0, metadata={_KEY: Figure(name, documentation, is_counter=True)})


def counter_by(label: str, name: str, documentation: str) -> Any:
    """A dataclass field that is a dictionary of counters by the value of `label`, and begins empty."""
    return field(default_factory=dict, metadata={_KEY: Figure(name, documentation, is_counter=True, label=label)})


def computed_gauge(name: str, documentation: str, label: str = "") -> Callable[[Method], Method]:
    """Decorator of a method of the dataclass: what it returns is a gauge."""

    def mark(method: Method) -> Method:
        setattr(method, _KEY, Figure(name, documentation, is_counter=False, label=label))
        return method

    return mark


def figures_of(statistics: Any) -> Iterator[tuple[Figure, Any]]:
    """Every figure of a statistics object and its value now, with those of the dataclasses that are its fields."""
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
    """The name of a connector's figure, and its kind: `failed_LeaseEnded` is `failed` of the kind `LeaseEnded`, and
    `taken_bytes_shm` is `taken_bytes` of the kind `shm`."""
    found = re.fullmatch(r"(\w+)_([A-Z]\w*)|(\w+_(?:bytes|seconds))_(.+)", figure)
    if found is None:
        return figure, ""
    return found[1] or found[3], found[2] or found[4]
