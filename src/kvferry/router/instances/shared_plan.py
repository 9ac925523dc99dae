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
        """Fewest uncached tokens for which a prompt is computed on a prefill instance; None: not set."""
        return None if self.plan is None else self.plan.disaggregate_from

    @property
    def targets_s(self) -> tuple[float, float] | None:
        """Targets of TTFT and ITL in seconds; None if the fleet has none."""
        return None if self.plan is None or not self.plan.itl_s else (self.plan.ttft_s, self.plan.itl_s)

    @property
    def starts_s(self) -> float:
        """Seconds that an instance takes to start, if one is started for a request that finds none; 0: none is
        started."""
        return 0.0 if self.plan is None else self.plan.starts_s

    def follow(self, text: str) -> None:
        """Replace the plan. `text`: JSON; empty: no plan."""
        if text != self.text:
            self.text, self.plan = text, msgspec.json.decode(text, type=FleetPlan) if text else None
