"""What the controller of a fleet has told its routers, beside which instances there are."""

from __future__ import annotations

import msgspec

from kvferry.core.messages.traffic import FleetPlan

NO_PLAN = b"{}"


class SharedFleetPlan:
    """The fleet's plan, as all routers of the port have it; `Membership` writes it."""

    def __init__(self) -> None:
        self.text = ""
        self.plan: FleetPlan | None = None

    @property
    def disaggregate_from(self) -> int | None:
        """Fewest uncached tokens for which a prompt is computed on a prefill instance; None: nobody has said so."""
        return None if self.plan is None else self.plan.disaggregate_from

    @property
    def targets_s(self) -> tuple[float, float] | None:
        """The targets of the time to the first token, and between two tokens; None: there are none."""
        return None if self.plan is None or not self.plan.itl_s else (self.plan.ttft_s, self.plan.itl_s)

    @property
    def starts_s(self) -> float:
        """How long an instance takes to start, if one is started for a request that finds none; 0: none is."""
        return 0.0 if self.plan is None else self.plan.starts_s

    def follow(self, text: str) -> None:
        """The plan as JSON; empty: there is none."""
        if text != self.text:
            self.text, self.plan = text, msgspec.json.decode(text, type=FleetPlan) if text else None
