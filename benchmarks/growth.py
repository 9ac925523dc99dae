"""Growth of costs with the numbers of waiting requests, deadlines and instances.

    python benchmarks/growth.py

| figure | what is timed |
|---|---|
| `abort_us` | the end of one of N waiting requests, chosen at random |
| `expire_us` | what a step spends on deadlines, with N requests that have one |
| `addresses_us` | looking through the headers of an answer for names of N instances |

CPU time of this thread, the median of several rounds; no model, nothing runs beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.scheduling.queues import SequenceQueues
from kvferry.engine.scheduling.sequence import Sequence
from kvferry.router.request.relay import address_pattern
from report import save

SIZES = (100, 1_000, 10_000)
INSTANCES = (2, 16, 64, 256)
ROUNDS, CALLS = 9, 100
HEADERS = b"\n".join(
    [b"text/event-stream; charset=utf-8", b"no-cache", b"no", b"0f3c9b1a2f3c4d5e6f708192a3b4c5d6", b"uvicorn"]
)


def per_call_us(call: Callable[[], object], num_calls: int) -> float:
    """CPU time of one call, in microseconds."""
    begun = time.thread_time()
    for _ in range(num_calls):
        call()
    return (time.thread_time() - begun) / num_calls * 1e6


def filled(num_waiting: int) -> tuple[SequenceQueues, list[Sequence]]:
    """Queues with so many waiting sequences, each with a deadline that does not pass."""
    queues, sampling = SequenceQueues(), SamplingParams(max_tokens=1)
    sequences = [
        Sequence(
            Request(request_id=str(order), prompt_token_ids=[1], sampling=sampling),
            order=order,
            block_size=16,
            model_identity="m",
        )
        for order in range(num_waiting)
    ]
    for sequence in sequences:
        queues.enqueue(sequence)
        queues.add_deadline(sequence, 1e9 + sequence.order)
    return queues, sequences


def abort_us(num_waiting: int) -> float:
    """See the module."""
    rounds = []
    for seed in range(ROUNDS):
        queues, sequences = filled(num_waiting)
        num_calls = min(CALLS, num_waiting // 2)
        gone = random.Random(seed).sample(sequences, num_calls)
        rounds.append(per_call_us(lambda: queues.remove(gone.pop()), num_calls))  # noqa: B023 - called at once
    return statistics.median(rounds)


def expire_us(num_waiting: int) -> float:
    """See the module."""
    queues, _ = filled(num_waiting)
    return statistics.median(per_call_us(lambda: queues.take_expired(0.0), CALLS) for _ in range(ROUNDS))


def addresses_us(num_instances: int) -> float:
    """See the module."""
    search = address_pattern([f"decode-{number}.kv.svc.cluster.local" for number in range(num_instances)]).search
    return statistics.median(per_call_us(lambda: search(HEADERS), 20 * CALLS) for _ in range(ROUNDS))


def measure() -> dict[str, dict[str, float]]:
    """All figures."""
    return {
        "abort_us": {str(size): round(abort_us(size), 2) for size in SIZES},
        "expire_us": {str(size): round(expire_us(size), 2) for size in SIZES},
        "addresses_us": {str(size): round(addresses_us(size), 2) for size in INSTANCES},
    }


def main() -> None:
    """Measure, print and save the figures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = measure()
    print(json.dumps(results, indent=1))
    save("growth", {"rounds": ROUNDS, "calls": CALLS}, results)


if __name__ == "__main__":
    main()
