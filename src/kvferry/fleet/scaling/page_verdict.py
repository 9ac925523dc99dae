"""The sentence of a router's page about its last requests: it says if another arrangement of the instances would be
better."""

from __future__ import annotations

from typing import Any

from kvferry.core.messages.traffic import FleetPlan, TrafficReport

_DEFAULT_TTFT_S, _DEFAULT_ITL_S = 2.0, 0.05
"""The targets if the fleet has none, as in `kvferry why`."""


def judge(report: TrafficReport, views: list[dict[str, Any]], plan: FleetPlan | None) -> str:
    """The sentence of `kvferry why` about these requests; empty if too few of them have ended."""
    from kvferry.fleet.scaling.predictor import (
        LatencyTargets,
    )  # imports NumPy's linear algebra, which routers do not need otherwise
    from kvferry.fleet.scaling.scaling_rules import Counts
    from kvferry.fleet.scaling.traffic import DecodeCapacity
    from kvferry.fleet.scaling.verdict import judge as judge_report

    alive = [view for view in views if view.get("alive")]
    decoding = [view for view in alive if view.get("role") == "decode"]
    counts = Counts(len(alive) - len(decoding), len(decoding))
    facts = [view.get("facts") or {} for view in decoding]
    capacity = DecodeCapacity.smallest(
        (int(fact.get("num_kv_tokens") or 0), int(fact.get("max_num_seqs") or 0)) for fact in facts
    )
    ttft_s, itl_s = (plan.ttft_s, plan.itl_s) if plan is not None and plan.ttft_s and plan.itl_s else (0.0, 0.0)
    targets = LatencyTargets(ttft_s or _DEFAULT_TTFT_S, itl_s or _DEFAULT_ITL_S)
    verdict = judge_report(report, counts, targets, capacity=capacity)
    return "" if verdict is None else verdict.sentence()
