"""The plan that the controller of a fleet sends to its routers, beside the list of instances."""

from __future__ import annotations

import msgspec

from kvferry.core.messages.traffic import FleetPlan


class SharedFleetPlan:
    """The fleet's plan, shared by all routers of the port; `Membership` writes it."""

    def __init__(self) -> None:
        self.text = ""
        self.plan: FleetPlan | None = None

    @property
    def disaggregate_from(self) -> int | None:
        """Minimum number of uncached tokens for which a prompt is computed on a prefill instance; None: not set."""
        return None if self.plan is None else self.plan.disaggregate_from

    @property
    def targets_s(self) -> tuple[float, float] | None:
        """Targets of TTFT and ITL in seconds; None if the fleet has none."""
        return None if self.plan is None or not self.plan.itl_s else (self.plan.ttft_s, self.plan.itl_s)

    @property
    def starts_s(self) -> float:
        """Seconds in which an instance starts, if the controller starts one for a request when there is none; 0: it
        starts none."""
        return 0.0 if self.plan is None else self.plan.starts_s

    def follow(self, text: str) -> None:
        """Replace the plan. `text`: JSON; empty: no plan."""
        if text != self.text:
            self.text, self.plan = text, msgspec.json.decode(text, type=FleetPlan) if text else None
