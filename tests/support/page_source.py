"""A server's view of itself for tests of the page, which a test changes as it likes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.messages.traffic import FleetPlan, RequestObservation, TrafficReport


class FakeSource:
    """Instances, requests and metrics are attributes; `num_looks` counts how often instances were asked for."""

    kind = "router"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.views = [view("prefill-0", "prefill"), view("decode-0", "decode")]
        self.requests: list[RequestObservation] = []
        self.records: list[dict[str, Any]] = []
        self.texts: dict[str, bytes | None] = {}
        self.fleet_plan: FleetPlan | None = None
        self.names = ["model"]
        self.num_looks = self.num_scrapes = 0
        self.failure: Exception | None = None

    async def instances(self) -> list[dict[str, Any]]:
        self.num_looks += 1
        if self.failure is not None:
            raise self.failure
        return [dict(shown) for shown in self.views]

    async def traffic(self, seconds: float) -> TrafficReport:
        now = self.clock.wall()
        requests = [request for request in self.requests if request.arrived >= now - seconds]
        return TrafficReport(now, len(self.requests), 0, requests)

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        return self.records[::-1][:limit]

    async def metrics(self) -> Mapping[str, bytes | None]:
        self.num_scrapes += 1
        return dict(self.texts)

    async def plan(self) -> FleetPlan | None:
        return self.fleet_plan

    async def models(self) -> list[str]:
        return self.names


def view(name: str, role: str, state: str = "up", **more: Any) -> dict[str, Any]:
    """An instance as GET /kvferry/instances shows it."""
    common = {"alive": state == "up", "in_flight": 0, "unit": "", "draining": False, "drained": False}
    return {"name": name, "role": role, "state": state, **common, "engine": "kvferry", "no_hand_off": "", **more}


def record(request_id: str, arrived: float, **more: Any) -> dict[str, Any]:
    """A request as GET /kvferry/decisions shows it, handed off and over."""
    timings = {
        "arrived": arrived,
        "routed": arrived + 0.001,
        "prefill_sent": arrived + 0.002,
        "prefill_answered": arrived + 0.2,
        "decode_sent": arrived + 0.2,
        "first_byte": arrived + 0.25,
        "done": arrived + 1.0,
    }
    known: dict[str, Any] = {
        "request_id": request_id,
        "path": "/v1/chat/completions",
        "policy": "cost",
        "model": "model",
        "prompt_tokens": 1000,
        "has_session": False,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "reason": "split",
        "scores": {"prefill prefill-0": 0.25},
        "cached_tokens": {"prefill-0": 16},
        "attempts": [],
        "timings": timings,
        "prefill_usage": None,
    }
    return {**known, **more}
