"""The cost of a round of the fleet's loop: CPU time for 1,000 instances, with nothing to do and in the worst cases.

python benchmarks/fleet_loop.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvferry.fleet.control.facts import ObservedInstance, Phase
from kvferry.fleet.control.loop import plan
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from report import save

ROUNDS = 50
SIZES = {"prefill": 400, "decode": 600}
NOW = 10_000.0


def fleet(model: str = "m", sizes: dict[str, int] = SIZES, **roll: int) -> DesiredFleet:
    roles = {role: {"count": count} for role, count in sizes.items()}
    return fleet_from({"name": "chat", "model": model, "mode": "pooling", "role": roles, "roll": roll})


def main() -> None:
    all_members = [
        ObservedInstance(f"{role}-{number}", role, fleet().revision, Phase.READY, float(number))  # type: ignore[arg-type]
        for role, count in SIZES.items()
        for number in range(count)
    ]
    cases: dict[str, tuple[DesiredFleet, list[ObservedInstance]]] = {
        "nothing to do": (fleet(), all_members),
        "all are to be started": (fleet(), []),
        "scaled to 5 + 5": (fleet(sizes={"prefill": 5, "decode": 5}), all_members),
        "a roll, 50 at a time": (fleet("n", surge=50), all_members),
        "a roll, 300 may be missing": (fleet("n", surge=0, unavailable=300), all_members),
    }
    results: dict[str, Any] = {}
    for name, (desired, members) in cases.items():
        times = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            steps = plan(desired, members, (), NOW)
            times.append(time.process_time() - begun)
        median_ms = statistics.median(times) * 1e3
        results[name] = {"median_ms": round(median_ms, 2), "steps": len(steps)}
        print(f"{name:<28} {median_ms:6.2f} ms   {len(steps)} steps")
    print(save("fleet_loop", {"instances": sum(SIZES.values()), "rounds": ROUNDS}, results))


if __name__ == "__main__":
    main()
