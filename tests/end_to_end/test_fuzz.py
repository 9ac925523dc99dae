"""Thousands of requests of every kind at a real deployment, and nothing is to come of it.

`KVFERRY_SEED` repeats a run, `KVFERRY_FUZZ` says how many requests the long one has: 20,000, and 5,000 with each commit
in CI, where each run has a seed of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from support.fuzz_run import Tally, fire
from support.processes import Cluster, cluster

pytestmark = pytest.mark.processes

TIGHT = ("--max-model-len=512", "--max-num-seqs=16")
LEASES = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 10}}
"""Shorter than what is waited for in the end: some requests ask P itself for a ticket, and nobody comes with it."""
REFERENCE = "The ferry leaves at"


def run(started: Cluster, *, seed: int, num: int) -> Tally:
    """Most at the router, some straight at P and D, whose tickets a stranger could forge."""
    urls = [started.router.url] * 4 + [started.prefill[0].url, started.decode[0].url]
    targets = [url.removeprefix("http://") for url in urls]
    print(f"seed {seed}: KVFERRY_SEED={seed} repeats this run")
    return asyncio.run(fire(targets, seed=seed, numbers=range(num), at_once=32, answer_s=120))


def require_unharmed(model: Path, folder: Path, *, seed: int, num: int) -> None:
    with cluster(model, folder, transfer=LEASES, engine=TIGHT) as started:
        processes = [started.router, *started.prefill, *started.decode]
        before = started.router.complete(REFERENCE)["choices"][0]
        tally = run(started, seed=seed, num=num)
        for (kind, status), count in sorted(tally.statuses.items(), key=str):
            print(f"{kind:14} {status} {count:6}")
        assert not tally.failures, "\n".join(tally.failures)
        assert [one.returncode for one in processes] == [None] * len(processes)
        started.require_clean(timeout_s=15)  # half of the time after which D gives up a load
        assert started.router.complete(REFERENCE)["choices"][0] == before
        for one in processes:
            assert "Traceback" not in one.log, one.log[one.log.index("Traceback") - 1000 :][:6000]
        assert sum(tally.statuses.values()) == num
        assert tally.count("valid", 200) > num // 5
        assert tally.count("nearly valid", 400) > num // 20
        assert tally.count("malformed", 400) > num // 20


def test_a_deployment_under_requests_of_every_kind(model_maker: Any, tmp_path: Path) -> None:
    require_unharmed(model_maker("llama"), tmp_path, seed=int(os.environ.get("KVFERRY_SEED", "1")), num=600)


@pytest.mark.full(in_every_part=True)
@pytest.mark.timeout(1800)
def test_a_deployment_under_thousands_of_them(model_maker: Any, tmp_path: Path) -> None:
    seed = int(os.environ.get("KVFERRY_SEED") or secrets.randbelow(10**9))
    require_unharmed(model_maker("llama"), tmp_path, seed=seed, num=int(os.environ.get("KVFERRY_FUZZ", "20000")))
