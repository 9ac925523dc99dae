"""The share of prompts that each eviction policy finds again, and its cost.

    python benchmarks/eviction.py --trace mooncake_synthetic.jsonl

Hit ratios are of the recorded trace, if one is given, and of made-up conversations of several shapes, beside Belady's
optimum. They do not depend on the machine. Microseconds are of processor time for each block of a trace, the replay
included. Operations a second are of one thread, with a million blocks kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from conversations import Conversations
from kvferry.store.eviction.table import POLICIES, make_eviction_policy
from kvferry.store.trace.comparison import Comparison, compare, compare_file
from report import print_machine, save

MILLION = 10**6
CAPACITIES = [MILLION // 2, MILLION, 3 * MILLION, 5 * MILLION, 15 * MILLION]
SHAPES = {
    "conversations": Conversations(),
    "conversations, answers tell": Conversations(shorter_if_continued=4.0),
    "conversations, quick turns": Conversations(
        duration_s=600, continued_share=0.6, mean_turns=8, gap_median_s=10, gap_p90_s=25, requests_per_s=6
    ),
}
SEED = 1
RUN_BLOCKS = 32


def main() -> None:
    """Run all, print tables, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a recorded trace, as JSON lines")
    parser.add_argument("--blocks", type=int, default=MILLION, help="blocks kept while operations are timed")
    arguments = parser.parse_args()
    print_machine()
    results: dict[str, Any] = {"hit_ratio": {}}
    for name, comparison in _comparisons(arguments.trace):
        results["hit_ratio"][name] = msgspec.to_builtins(comparison)
        print(f"\n{name}\n{_table(comparison)}", flush=True)
    results["operations_per_s"] = {name: _speed(name, arguments.blocks) for name in POLICIES}
    print(f"\noperations a second with {arguments.blocks} blocks: {results['operations_per_s']}")
    print(save("eviction", {"capacities": CAPACITIES, "seed": SEED, "blocks": arguments.blocks}, results))


def _comparisons(trace: Path | None) -> Sequence[tuple[str, Comparison]]:
    comparisons = [] if trace is None else [(trace.stem, compare_file(trace, list(POLICIES), CAPACITIES))]
    for name, shape in SHAPES.items():
        requests = partial(iter, shape.requests(SEED))
        comparisons.append((name, compare(requests, list(POLICIES), CAPACITIES)))
    return comparisons


def _table(comparison: Comparison) -> str:
    rows = [["", *(f"{tokens / MILLION:g}M" for tokens in comparison.optimal_hit_ratio), "µs a block"]]
    for name in POLICIES:
        of_one = [row for row in comparison.policies if row.policy == name]
        costs = [row.cpu_s / row.operations * 1e6 for row in of_one]
        rows.append([name, *(f"{row.hit_ratio:.3f}" for row in of_one), f"{min(costs):.1f}-{max(costs):.1f}"])
    rows.append(["optimum", *(f"{ratio:.3f}" for ratio in comparison.optimal_hit_ratio.values())])
    rows.append(["infinite", f"{comparison.infinite_hit_ratio:.3f}"])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _speed(name: str, num_blocks: int) -> float:
    """Operations a second of a full cache: half of them find a block, half evict one and insert another."""
    policy = make_eviction_policy(name, num_blocks)
    for key in range(num_blocks):
        policy.insert(key, key * 1e-4, key - 1 if key % RUN_BLOCKS else None)
    now, rounds = num_blocks * 1e-4, 200_000
    started = time.thread_time()
    for key in range(num_blocks, num_blocks + rounds):
        now += 1e-4
        policy.access(key - num_blocks // 2, now)
        policy.evict(now)
        policy.insert(key, now, key - 1 if key % RUN_BLOCKS else None)
    return round(3 * rounds / (time.thread_time() - started))


if __name__ == "__main__":
    main()
