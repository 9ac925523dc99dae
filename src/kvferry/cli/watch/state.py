"""The state of a router or an instance, from the stream of its page."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.core.errors import ProtocolError

MAX_POINTS, MAX_EVENTS, MAX_REQUESTS = 300, 200, 512
_LOOK_BACK = 15
"""Number of points that are searched for the last value of a figure: a point lacks it if nothing was measured."""


class WatchedState:
    """The data that a page would show. Changed by `apply` only."""

    def __init__(self) -> None:
        self.kind, self.now = "router", 0.0
        self.models: list[str] = []
        self.instances: dict[str, dict[str, Any]] = {}
        self.points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.requests: dict[str, dict[str, Any]] = {}
        self.verdict = ""

    def apply(self, content: bytes) -> None:
        """Apply the content of one event: a snapshot or a delta. Raises `ProtocolError` if it is neither."""
        try:
            event = msgspec.json.decode(content, type=dict[str, Any])
            self._apply(event)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"an update cannot be read: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"an update lacks something: {error!r}") from error

    def _apply(self, event: Mapping[str, Any]) -> None:
        self.now = float(event["now"])
        if event["type"] == "snapshot":
            self.kind, self.models = str(event["kind"]), [str(name) for name in event["models"]]
            self.instances, self.requests = {}, {}
            self.points.clear()
            self.points.extend(event["points"])
            self.events.clear()
        for name, changes in event.get("instances", {}).items():
            if changes is None:
                self.instances.pop(name, None)
            else:
                self.instances.setdefault(name, {}).update(changes)
        for request in event.get("requests", ()):
            self.requests.pop(request["request_id"], None)
            self.requests[request["request_id"]] = request
        while len(self.requests) > MAX_REQUESTS:
            del self.requests[next(iter(self.requests))]
        self.events.extend(event.get("events", ()))
        if event["type"] != "snapshot" and "point" in event:
            self.points.append(event["point"])
        self.verdict = str(event.get("verdict", self.verdict))

    def last(self, name: str) -> float | None:
        """The newest value of a figure within about half a minute; None: there is none."""
        for index in range(1, min(_LOOK_BACK, len(self.points)) + 1):
            value = self.points[-index].get(name)
            if value is not None:
                return float(value)
        return None

    def busiest(self, role: str) -> str:
        """The instance of a role that has at least twice as many requests as the mean of the others, and at least four
        more; empty: the load is even."""
        loads = {
            name: float(instance.get("running") or 0) + float(instance.get("waiting") or 0)
            for name, instance in self.instances.items()
            if instance.get("role") == role and instance.get("alive")
        }
        if len(loads) < 2:
            return ""
        name = max(loads, key=lambda candidate: loads[candidate])
        others = (sum(loads.values()) - loads[name]) / (len(loads) - 1)
        return name if loads[name] >= max(2 * others, others + 4) else ""

    def to_builtins(self) -> dict[str, Any]:
        """The current figures, for `--json`."""
        names = (
            "requests", "input_tokens", "output_tokens", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "hits",
            "hand_off_bytes", "hand_off_ms", "queue", "prefill", "hand_off", "decode_queue", "aggregated",
        )  # fmt: skip
        return {
            "kind": self.kind,
            "at": self.now,
            "models": self.models,
            "figures": {name: self.last(name) for name in names},
            "instances": list(self.instances.values()),
            "busiest": {role: self.busiest(role) for role in ("prefill", "decode")},
            "events": list(self.events),
            "verdict": self.verdict,
        }
