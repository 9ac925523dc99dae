"""Requests a second that an adaptive fleet serves within its targets, beside the best fixed division into P and D of as
many instances.

    python benchmarks/goodput.py                           both kinds of traffic, on the model of a fleet
    python benchmarks/goodput.py --simulator --traffic changing    some cells, in the simulator
    python benchmarks/goodput.py --plot                    the picture again, from what is kept

*Goodput*: the highest rate, on a ladder of rates, at which at least 90 % of the requests meet both targets. For each of
5 x 5 targets:

    fixed     each division into P and D, whose router always hands off (`--disaggregate-from 0`): of all divisions the
              best for this cell, chosen after all were run
    adaptive  the router as it comes, which has D compute prompts where that keeps the targets, and kvferry's scaler
              with the targets of the cell, which may change roles, but neither starts nor stops anything. It begins
              with as many P as D

Traffic is Poisson. `steady` is always the same mix of lengths; `changing` turns every two minutes from long prompts
with short answers to short prompts with long answers, and back. What arrives in the first two minutes is served, but
not counted, on both sides.

The simulator takes 20 ms of CPU time a request, which for the grid is hours. So the grid is of the model
(`scaled_model.py`); `--simulator` runs both sides of three cells of the diagonal, at the rate that the best fixed
division serves in the model. The grid takes four minutes of a core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import scaled_rules
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaling_rules import Counts, ScalingRules
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.times import StepTimes
from kvferry.sim.traffic import Arrival
from report import RESULTS, earlier, print_machine, processor, save
from scaled_fleet import ScaledFleet
from scaled_model import ScaledModel
from scaled_rules import Kvferry, Static

NUM_INSTANCES = 4
GOAL = 0.9
TTFT_S = (0.75, 1.0, 1.5, 3.0, 6.0)
ITL_S = (0.020, 0.025, 0.030, 0.040, 0.080)
STEP = StepTimes(base_s=0.012, prefill_token_s=100e-6, decode_sequence_s=400e-6, context_token_s=20e-9)
"""Of no machine that was measured."""
INSTANCE = SimInstanceSpec(num_blocks=8192, max_model_len=32768, times=STEP, has_contents=False, tokens_at_once=16)
LASTS_S, WARM_S, PHASE_S = 360.0, 120.0, 120.0
RATES = [1.06**index for index in range(8, 46)]
"""From 1.6 to 14 requests a second."""
KINDS, SEEDS = ("steady", "changing"), [13]
LONG, SHORT, MIXED = ((8.2, 0.5), (4.4, 0.5)), ((6.4, 0.7), (6.0, 0.5)), ((7.6, 0.8), (5.3, 0.6))
"""Prompts and answers: mean and deviation of the logarithms of their lengths."""

Cell = tuple[float, float]


def traffic(kind: str, rate: float, seed: int, lasts_s: float = LASTS_S) -> list[Arrival]:
    """So many requests a second, in the mean."""
    random, now, arrivals = Random(seed), 0.0, []
    while (now := now + random.expovariate(rate)) < lasts_s:
        prompt, answer = MIXED if kind == "steady" else (LONG, SHORT)[int(now / PHASE_S) % 2]
        tokens = min(12_000, 32 + int(random.lognormvariate(*prompt)))
        arrivals.append(Arrival(now, tokens, min(2_000, 2 + int(random.lognormvariate(*answer)))))
    return arrivals


class Fixed(Static):
    """One division, and every prompt is handed off."""

    from_tokens = 0


def adapting(targets: LatencyTargets) -> ScalingRules:
    """As many instances as there are, in any division."""
    max_instances = NUM_INSTANCES - 1
    return ScalingRules(
        targets=targets,
        min_counts=Counts(1, 1),
        max_counts=Counts(max_instances, max_instances),
        budget=NUM_INSTANCES,
        overflows=True,
        switches=frozenset({("prefill", "decode"), ("decode", "prefill")}),
        cool_down_s=1e9,  # nothing is ever released
    )


@dataclass
class Runs:
    """Of one kind of traffic, each made once."""

    kind: str
    seeds: Sequence[int]
    fleet: type[ScaledFleet] | type[ScaledModel] = ScaledModel
    lasts_s: float = LASTS_S
    _fixed: dict[tuple[int, float], list[tuple[float, float] | None]] = field(default_factory=dict)
    _adaptive: dict[tuple[Cell, float], float] = field(default_factory=dict)

    def fixed(self, num_prefill: int, rate: float, cell: Cell) -> float:
        """The share of requests that a division keeps within these targets."""
        key = num_prefill, rate
        if key not in self._fixed:
            counts = Counts(num_prefill, NUM_INSTANCES - num_prefill)
            self._fixed[key] = self._answered(lambda: Fixed(counts), counts, rate, LatencyTargets(*cell))
        return _share(self._fixed[key], cell)

    def best_fixed(self, rate: float, cell: Cell) -> tuple[float, int]:
        """Of all divisions, and how many P it has."""
        return max((self.fixed(number, rate, cell), number) for number in range(1, NUM_INSTANCES))

    def adaptive(self, rate: float, cell: Cell) -> float:
        """The same of the fleet that adapts."""
        if (cell, rate) not in self._adaptive:
            targets, half = LatencyTargets(*cell), NUM_INSTANCES // 2
            begin = Counts(half, NUM_INSTANCES - half)
            answered = self._answered(lambda: Kvferry(begin, adapting(targets)), begin, rate, targets)
            self._adaptive[cell, rate] = _share(answered, cell)
        return self._adaptive[cell, rate]

    def _answered(self, rule: Any, begin: Counts, rate: float, targets: LatencyTargets) -> Any:
        latencies: list[tuple[float, float] | None] = []
        for seed in self.seeds:
            arrivals = traffic(self.kind, rate, seed, self.lasts_s)
            fleet = self.fleet(rule(), begin, arrivals, targets, INSTANCE)
            fleet.run()
            counted = [(ttft, itl) for at_s, ttft, itl in fleet.answered if at_s >= WARM_S]
            missing = sum(arrival.at_s >= WARM_S for arrival in arrivals) - len(counted)
            latencies += counted + [None] * missing
        return latencies

    def goodput_fixed(self, cell: Cell) -> tuple[int, int]:
        """The place on the ladder, -1 where even the lowest rate is too much, and how many P the best division has."""
        best = -1, 0
        for index, rate in enumerate(RATES):
            share, number = self.best_fixed(rate, cell)
            if share >= GOAL:
                best = index, number
            elif share < GOAL / 2 and index > best[0] + 3:
                break
        return best

    def goodput_adaptive(self, cell: Cell, begin: int) -> int:
        """The same of the fleet that adapts, searched from a place on: upwards until it is too much, or downwards."""
        index = max(0, begin)
        if self.adaptive(RATES[index], cell) >= GOAL:
            while index + 1 < len(RATES) and self.adaptive(RATES[index + 1], cell) >= GOAL:
                index += 1
            return index
        index -= 1
        while index >= 0 and self.adaptive(RATES[index], cell) < GOAL:
            index -= 1
        return index


def _share(answered: Sequence[tuple[float, float] | None], cell: Cell) -> float:
    return sum(latency is not None and latency[0] <= cell[0] and latency[1] <= cell[1] for latency in answered) / len(
        answered
    )


def rate_at(index: int) -> float:
    """Requests a second; 0 below the ladder."""
    return RATES[index] if index >= 0 else 0.0


def grid(runs: Runs) -> list[dict[str, Any]]:
    """Both goodputs of each cell."""
    cells = []
    for ttft_s in TTFT_S:
        progress = []
        for itl_s in ITL_S:
            cell = ttft_s, itl_s
            fixed, num_prefill = runs.goodput_fixed(cell)
            adaptive = runs.goodput_adaptive(cell, fixed)
            cells.append(
                {
                    "ttft_s": ttft_s,
                    "itl_s": itl_s,
                    "fixed": rate_at(fixed),
                    "best_prefill": num_prefill,
                    "adaptive": rate_at(adaptive),
                    "within_at_fixed": runs.adaptive(RATES[max(0, fixed)], cell),
                    "fixed_within": runs.best_fixed(RATES[max(0, fixed)], cell)[0],
                }
            )
            progress.append(f"{rate_at(fixed):.2f} ({num_prefill}P) {rate_at(adaptive):.2f}")
        print(f"| {ttft_s:g} s | " + " | ".join(progress) + " |", flush=True)
    return cells


def compare_simulated(kind: str, saved: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Both sides of three cells of the diagonal, in the simulator, at the rate of the best fixed division."""
    runs, cells = Runs(kind, seeds, ScaledFleet), []
    for cell in list(zip(TTFT_S, ITL_S, strict=True))[::2]:
        model = next(earlier_cell for earlier_cell in saved if (earlier_cell["ttft_s"], earlier_cell["itl_s"]) == cell)
        fixed = runs.fixed(model["best_prefill"], model["fixed"], cell)
        adaptive = runs.adaptive(model["fixed"], cell)
        print(f"{cell[0]:g} s, {1e3 * cell[1]:g} ms, {model['fixed']:.2f} a second: fixed {model['best_prefill']}P"
              f" {fixed:.1%}, adaptive {adaptive:.1%}", flush=True)  # fmt: skip
        cells.append({"cell": cell, "rate": model["fixed"], "fixed": fixed, "adaptive": adaptive})
    return cells


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The gain of the adaptive fleet, in percent, a panel for each kind of traffic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(results), 4.6), layout="constrained")
    for axes, (kind, cells) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        gains = [100 * (cell["adaptive"] / cell["fixed"] - 1) if cell["fixed"] else 0.0 for cell in cells]
        rows = [gains[position : position + len(ITL_S)] for position in range(0, len(gains), len(ITL_S))]
        axes.imshow(rows, vmin=-40, vmax=40, cmap="RdYlGn", origin="lower", aspect="auto")
        for position, (cell, gain) in enumerate(zip(cells, gains, strict=True)):
            label = f"{gain:+.0f} %\n{cell['fixed']:.1f} ({cell['best_prefill']}P) → {cell['adaptive']:.1f}"
            axes.text(position % len(ITL_S), position // len(ITL_S), label, ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(ITL_S)), [f"{1e3 * itl_s:g} ms" for itl_s in ITL_S])
        axes.set_yticks(range(len(TTFT_S)), [f"{ttft_s:g} s" for ttft_s in TTFT_S])
        axes.set(title=f"{kind} traffic", xlabel="target between tokens", ylabel="target until the first token")
    figure.suptitle(f"Requests a second within the targets, {NUM_INSTANCES} instances: best fixed → adaptive")
    figure.savefig(path, dpi=110)


def main() -> None:
    """The grid, or a part of it in the simulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument(
        "--simulator", action="store_true", help="three cells of the grid that is kept, in the simulator"
    )
    parser.add_argument("--plot", action="store_true", help="only the picture of what is kept")
    options = parser.parse_args()
    scaled_rules.INSTANCE = INSTANCE  # what the scaler is told of an instance
    print_machine()
    name = "goodput" if options.seeds == SEEDS else "goodput_" + "_".join(map(str, options.seeds))
    settings = {
        "instances": NUM_INSTANCES,
        "goal": GOAL,
        "step": {name: getattr(STEP, name) for name in STEP.__struct_fields__},
        "lasts_s": LASTS_S,
        "warm_s": WARM_S,
        "phase_s": PHASE_S,
        "ladder": RATES[1] / RATES[0],
        "lengths": {"long": LONG, "short": SHORT, "steady": MIXED},
        "seeds": options.seeds,
    }
    for kind in [] if options.plot else options.traffic:
        begun = time.process_time()
        print(f"{kind}: {settings}", flush=True)
        if options.simulator:
            cells = compare_simulated(kind, earlier("goodput", {})[kind], options.seeds)
            print(save("goodput_simulator", settings, {**earlier("goodput_simulator", {}), kind: cells}))
        else:
            print("| TTFT, ITL: | " + " | ".join(f"{1e3 * itl_s:g} ms" for itl_s in ITL_S) + " |")
            cells = grid(Runs(kind, options.seeds))
            print(save(name, settings, {**earlier(name, {}), kind: cells}))
        print(f"{time.process_time() - begun:.0f} s of CPU time")
    path = RESULTS / f"{name}.{processor()}.png"
    plot(earlier(name, {}), path)
    print(path)


if __name__ == "__main__":
    main()
