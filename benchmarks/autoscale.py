"""Instance-seconds that each scaling rule takes, and the share of requests that it keeps within targets.

    python benchmarks/autoscale.py --trace azure_2023_code.csv --from-s 0 --for-s 600 --speed 2
    python benchmarks/autoscale.py --trace azure_2023_code.csv --for-s 3600 --model
    python benchmarks/autoscale.py --trace sine --for-s 900 --rules kvferry hpa static

`--trace sine`, `reasoning` and `bursts` are generated: a rate that goes from 1 to 8 requests a second and back in 900 s
(8,000 tokens in, 1,000 out, as in dynamo #10528), long answers whose rate changes every two minutes, and bursts of 15
to 60 s at twelve times the rate between them. `mmpp`, `diurnal` and `mix` are generated too, and held out
(`held_out.py`): nothing was tuned on them, but for those of other seeds (`--seed`).

A trace runs on a simulated fleet (`scaled_fleet.py`), or with `--model` on a model of it that is a hundred times as
fast and knows less (`scaled_model.py`). What is compared (`scaled_rules.py`) decides every five seconds.

`--dynamo-python` adds NVIDIA Dynamo's own planner, which runs in an environment of its own (`dynamo_side.py` says how
to make it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from dynamo_planner import Dynamo
from held_out import MAKERS, SEEDS, held_out
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaler import Forecast
from kvferry.fleet.scaling.scaling_rules import Counts, ScalingRules
from kvferry.fleet.scaling.traffic import Workload
from kvferry.sim.traffic import Arrival, faster, part_of, read_traffic
from report import print_machine, save
from scaled_fleet import ScaledFleet
from scaled_model import ScaledModel
from scaled_rules import (
    GOAL,
    RULES,
    START_S,
    TIMES,
    Clairvoyant,
    DecodeTps,
    Hpa,
    Kvferry,
    RatioClamp,
    Rule,
    Static,
    TokenVelocity,
    uncached,
)

RULES_HERE = ("kvferry", "clairvoyant", "hpa", "clamp", "velocity", "dynamo", "static", "tps")
GENERATED = ("sine", "reasoning", "bursts")


def compare(
    arrivals: Sequence[Arrival],
    start: Counts,
    rules: ScalingRules,
    names: Sequence[str],
    fleet: type[ScaledFleet] | type[ScaledModel] = ScaledFleet,
    dynamo_python: str = "",
) -> dict[str, Any]:
    """Figures of each rule."""
    results: dict[str, Any] = {}

    def run(name: str, rule: Rule, begin: Counts = start) -> dict[str, Any]:
        figures = results[name] = fleet(rule, begin, arrivals, rules.targets).run()
        if isinstance(rule, Kvferry):
            figures["said"] = rule.said
        print(
            f"{name:<16} {100 * figures['within']:>6.2f} % {figures['instance_s']:>8.0f} instance-s"
            f"  TTFT {100 * figures['ttft_within']:.1f} % ITL {100 * figures['itl_within']:.1f} %"
            f"  most {figures['most']}  starts {figures['starts']}  roles {figures['switches']}"
            f"  {figures['complete']}/{figures['requests']}  ({figures['cpu_s']:.0f} s CPU) {figures['errors']}",
            flush=True,
        )
        return figures

    if "kvferry" in names:
        run("kvferry", Kvferry(start, rules))
    if "clairvoyant" in names:
        run("clairvoyant", Clairvoyant(start, rules, arrivals))
    if "hpa" in names:
        run("hpa", Hpa())
    if "clamp" in names:
        run("ratio clamp", RatioClamp())
    if "velocity" in names:
        run("token velocity", TokenVelocity(rules.targets))
    if "dynamo" in names and dynamo_python:
        for name, settings in Dynamo.SETTINGS.items():
            with Dynamo(dynamo_python, rules.targets, settings) as planner:
                run(f"dynamo {name}", planner)
    best = start
    if "static" in names:
        sizes = sorted((Counts(p, d) for p in range(1, 7) for d in range(1, 7)), key=lambda counts: counts.total)
        for best in _promising(arrivals, rules, sizes):
            if run(f"static {best.prefill}+{best.decode}", Static(best), best)["within"] >= GOAL:
                break
    if "tps" in names:
        tokens_per_s = sum(arrival.answer_tokens for arrival in arrivals) / arrivals[-1].at_s
        run("decode tps", DecodeTps(tokens_per_s / best.decode, best.prefill / best.decode))
    return results


def _promising(arrivals: Sequence[Arrival], rules: ScalingRules, sizes: Sequence[Counts]) -> list[Counts]:
    """Of each number of instances the division that is expected to keep the most, where that is more than half."""
    requests = [
        (arrival.at_s, left, arrival.answer_tokens) for arrival, left in zip(arrivals, uncached(arrivals), strict=True)
    ]  # fmt: skip
    outlook = Forecast(rules, [Workload.of(requests, arrivals[-1].at_s)], TIMES)
    best: dict[int, Counts] = {}
    for counts in sizes:
        before = best.get(counts.total)
        if before is None or outlook.best(counts).attained > outlook.best(before).attained:
            best[counts.total] = counts
    return [prediction for prediction in best.values() if outlook.best(prediction).attained > 0.5]


def generated(name: str, seed: int, for_s: float) -> list[Arrival]:
    """Poisson processes with a rate that changes."""
    random, now, arrivals = Random(seed), 0.0, []
    if name == "bursts":
        return _bursts(random, for_s)
    max_rate = 8.0 if name == "sine" else 3.0
    while (now := now + random.expovariate(max_rate)) < for_s:
        if name == "sine":
            rate, prompt, output = 4.5 - 3.5 * math.cos(2 * math.pi * now / 900.0), 8000, 1000
        else:
            rate = 1.0 if int(now / 120.0) % 3 else 3.0
            prompt = min(8000, 16 + int(random.lognormvariate(6.0, 1.0)))
            output = min(6000, 50 + int(random.lognormvariate(7.0, 0.7)))
        if random.random() < rate / max_rate:
            arrivals.append(Arrival(now, prompt, output))
    return [replace(arrival, at_s=arrival.at_s - arrivals[0].at_s) for arrival in arrivals]


def _bursts(random: Random, for_s: float) -> list[Arrival]:
    now, arrivals, in_burst, until = 0.0, [], False, random.uniform(60, 200)
    while now < for_s:
        now += random.expovariate(12.0 if in_burst else 1.0)
        if now > until:
            in_burst, now = not in_burst, until
            until = now + (random.uniform(15, 60) if in_burst else random.uniform(60, 400))
            continue
        prompt = min(8000, 50 + int(random.lognormvariate(7.0, 0.9)))
        arrivals.append(Arrival(now, prompt, max(1, int(random.lognormvariate(4.5, 0.8)))))
    return [replace(arrival, at_s=arrival.at_s - arrivals[0].at_s) for arrival in arrivals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="a file, or the name of a generated one")
    parser.add_argument("--from-s", type=float, default=0.0)
    parser.add_argument("--for-s", type=float, default=600.0)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of a generated trace; default: 1, or that of a held-out one")
    parser.add_argument("--ttft-s", type=float, default=1.0)
    parser.add_argument("--itl-s", type=float, default=0.030)
    parser.add_argument("--start", type=int, nargs=2, default=(2, 1), metavar=("P", "D"), help="what rules begin with")
    parser.add_argument("--model", action="store_true", help="a model of the fleet instead of the simulator")
    parser.add_argument("--dynamo-python", default="", help="Python of an environment with Dynamo's planner")
    parser.add_argument("--rules", nargs="+", choices=RULES_HERE, default=RULES_HERE)
    parser.add_argument("--save", default="", help="a name for the results, autoscale_NAME")
    options = parser.parse_args()
    print_machine()
    if options.trace in MAKERS:
        options.seed = SEEDS[options.trace] if options.seed is None else options.seed
        arrivals = held_out(options.trace, options.for_s, options.seed)
    elif options.trace in GENERATED:
        options.seed = 1 if options.seed is None else options.seed
        arrivals = generated(options.trace, options.seed, options.for_s)
    else:
        recorded = faster(read_traffic(Path(options.trace)), options.speed)
        arrivals = part_of(recorded, from_s=options.from_s, until_s=options.from_s + options.for_s)
    print(f"{len(arrivals)} requests in {options.for_s:g} s")
    rules = replace(RULES, targets=LatencyTargets(options.ttft_s, options.itl_s))
    fleet = ScaledModel if options.model else ScaledFleet
    results = compare(arrivals, Counts(*options.start), rules, options.rules, fleet, options.dynamo_python)
    if options.save:
        settings = {**vars(options), "trace": Path(options.trace).name, "dynamo_python": bool(options.dynamo_python)}
        save(f"autoscale_{options.save}", {**settings, "goal": GOAL, "start_s": START_S}, results)


if __name__ == "__main__":
    main()
