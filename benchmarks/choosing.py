"""The cost of the router's choice for a request, by policy and number of instances. All its work on one request, in
this process and without any I/O: the prompt's prefixes, the choice of both
instances, the account of its legs, its record and its metrics.

    python benchmarks/choosing.py                                 1, 8, 32 and 128 instances of each role
    python benchmarks/choosing.py --pairs 64 --policy cost
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.app import build_router
from kvferry.router.body import RequestBody
from kvferry.router.choice.decisions import PrefillUsage
from kvferry.router.choice.placement import Placement
from kvferry.router.choice.plan import make_plan
from kvferry.router.choice.policies.table import POLICIES
from kvferry.router.config import RouterConfig
from kvferry.router.instances.load import Work
from kvferry.router.request.services import Services
from report import save

PATH = "/v1/completions"
ROUNDS, ROUND_S = 15, 0.1


def services_of(num_pairs: int, policy: str) -> Services:
    """Those of a router before so many instances of each role."""
    urls = [tuple(f"http://{role}{number}:1" for number in range(num_pairs)) for role in "pd"]
    config = RouterConfig(prefill_url=urls[0], decode_url=urls[1], policy=policy, disaggregate_from="0")
    services = build_router(config).services
    for instance in services.pools:
        instance.record_probe(
            InstanceFacts(engine_id=instance.name, connector="P2pConnector", layout="same", model_names=["m"])
        )
    return services


def serve(services: Services, body: RequestBody, usage: PrefillUsage) -> None:
    """The router's decisions and records of one request that succeeds."""
    chooser, now = services.chooser, services.clock.wall()
    traits = chooser.read(PATH, body, {})
    decision = chooser.record(PATH, traits, b"a request", now)
    placement = Placement(chooser, services.pools, services.metrics, 1, traits, decision)
    placement.plan(make_plan(PATH, body, services.pools))
    prefill = placement.next_prefill()
    decode = placement.next_decode(prefill)
    assert prefill is not None
    assert decode is not None
    works = [
        Work(leg.load, traits.num_tokens, services.clock.monotonic(), computes=leg is prefill, decodes=leg is decode)
        for leg in (prefill, decode)
    ]
    chooser.estimates.prefilled(prefill.name, usage.prompt_tokens, 0.01)
    for work in works:
        work.end()
    decision.prefill_usage = usage
    services.metrics.phases(decision.phases())
    services.metrics.request_done(PATH, 200, 0.1)


def microseconds(services: Services, prompt: str) -> tuple[float, float]:
    """Of a request: the least and the median of some rounds, in processor time."""
    body = RequestBody.parse(json.dumps({"model": "m", "prompt": prompt, "max_tokens": 8}).encode())
    usage, times_us = PrefillUsage(prompt_tokens=200), list[float]()
    for _ in range(ROUNDS):
        begun, number = time.process_time(), 0
        while (taken := time.process_time() - begun) < ROUND_S:
            for _ in range(20):
                serve(services, body, usage)
            number += 20
        times_us.append(taken / number * 1e6)
    return min(times_us), sorted(times_us)[len(times_us) // 2]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--policy", nargs="+", default=["cost", "round_robin"], choices=sorted(POLICIES))
    parser.add_argument("--prompt-bytes", type=int, default=400)
    parser.add_argument("--no-save", action="store_true")
    settings = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"{'policy':<14}{'instances':>12}{'least µs':>12}{'median µs':>12}")
    for policy in settings.policy:
        for num_pairs in settings.pairs:
            min_us, median = microseconds(services_of(num_pairs, policy), "a" * settings.prompt_bytes)
            results[f"{policy} {num_pairs}"] = {"least_us": min_us, "median_us": median}
            print(f"{policy:<14}{f'{num_pairs} + {num_pairs}':>12}{min_us:>12.1f}{median:>12.1f}", flush=True)
    if not settings.no_save:
        print(f"\n{save('choosing', vars(settings), results)}")


if __name__ == "__main__":
    main()
