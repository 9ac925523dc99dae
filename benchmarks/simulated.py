"""Does the simulator say what a real fleet does? The same open-loop trace on both, with times that `kvferry calibrate`
has measured, and the errors of the percentiles of TTFT, time between tokens, and time to the last token.

    python benchmarks/simulated.py                       runs all fleets, and calibrates before and after each five
    python benchmarks/simulated.py --only 1P1D 2P1D      some; the others' results are kept
    python benchmarks/simulated.py --again               simulates again what was measured before
    python benchmarks/simulated.py --again --times F     with other times

How fast a machine is changes from minute to minute. So what is simulated is the mean of what follows from the
calibration before a fleet was measured and from that after it. How far these two are from each other is printed, and so
is how far the fleets are from what was measured of them the last time, which a simulator without any error would be
off by.

The machine must be quiet: whatever else runs is in what is measured, and not in what is simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvferry.cli.planning.simulated import world_of
from kvferry.core.settings.units import parse_bytes
from kvferry.fleet.spec.fleet_spec import fleet_from
from kvferry.sim.replay import Percentiles, TraceReplay
from kvferry.sim.targets import Targets
from kvferry.sim.times import MachineTimes, read_times
from kvferry.sim.traffic import Arrival, TracePrompt
from load import Streamed, stream_completion
from report import RESULTS, earlier, print_machine, processor, save
from served import kvferry, replicas

MODEL = "kvferry/tiny-python"
KV_MEMORY, TOKEN_BYTES = "256MiB", 6144
KV = (f"--kv-cache-memory={KV_MEMORY}", "--dtype=float32")
DOCUMENTS, SMALL = 12, "12MiB"
"""Beginnings that prompts share, and KV caches that have room for some of them."""
VOCABULARY = 1000
WARM_TOKENS = 1400
TOGETHER = 5
"""Fleets that are measured between two calibrations."""
LATENCIES = ("ttft", "itl", "e2e")
GOALS = {"p50": 0.05, "p90": 0.1, "p99": 0.1}
PERCENTILES = tuple(GOALS)


@dataclass(frozen=True)
class Configuration:
    """A fleet and its traffic. `rate`: requests per second; `shared`: of all prompts, those that begin like others,
    with one of so many `documents`. `kv_memory`: of each KV cache; `stores`: beside P2P, their `{folder}` is new."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    rate: float = 2.0
    chunk: int = 512
    shared: float = 0.0
    documents: int = 1
    kv_memory: str = ""
    stores: tuple[str, ...] = ()
    router: tuple[str, ...] = ("--disaggregate-from=0",)

    @property
    def engine(self) -> tuple[str, ...]:
        """Flags of every instance."""
        kv = KV if not self.kv_memory else (f"--kv-cache-memory={self.kv_memory}", *KV[1:])
        return (*kv, f"--max-num-batched-tokens={self.chunk}")

    @property
    def num_warm(self) -> int:
        """Number of requests before the trace, which fill all KV caches: memory takes longer when it is
        written to for the first time, and the first requests find connections and code that are not there yet."""
        kv_bytes = parse_bytes(self.kv_memory or KV_MEMORY, "KV_MEMORY")
        return -(-kv_bytes // (WARM_TOKENS * TOKEN_BYTES)) * max(self.prefill, self.decode, self.both)

    def transfer(self, folder: str) -> str:
        """The connectors' configuration; empty: the default."""
        if not self.stores:
            return ""
        stores = [store.format(folder=folder) for store in self.stores]
        store = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": stores}}
        options = {"connectors": [{"kv_connector": "P2pConnector"}, store]}
        return json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": options})

    def spec(self) -> dict[str, Any]:
        """As a fleet's TOML says it."""
        counts = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return {
            "name": "simulated",
            "model": MODEL,
            "mode": "pooling",
            "engine": {"args": list(self.engine), "kv_transfer_config": self.transfer("kv")},
            "router": {"args": list(self.router if self.prefill else ())},
            "role": {role: {"count": number} for role, number in counts.items() if number},
        }

    @contextmanager
    def running(self) -> Iterator[str]:
        """The real one; its URL."""
        if self.both:
            with replicas(MODEL, sorted(os.sched_getaffinity(0))[: self.both], *self.engine) as url:
                yield url
            return
        counts = ("--prefill", str(self.prefill), "--decode", str(self.decode))
        with tempfile.TemporaryDirectory() as folder:
            transfer = ("--kv-transfer-config", self.transfer(folder)) if self.stores else ()
            with kvferry("serve", MODEL, *counts, "--port", "0", *self.engine, *self.router, *transfer) as url:
                yield url


CONFIGURATIONS = {
    "1P1D": Configuration(1, 1),
    "1P1D, half the load": Configuration(1, 1, rate=1.0),
    "1P1D, twice the load": Configuration(1, 1, rate=4.0),
    "1P1D, chunks of 128": Configuration(1, 1, chunk=128),
    "1P1D, shared prefixes": Configuration(1, 1, shared=0.6),
    "1P1D, the router decides": Configuration(1, 1, router=()),
    "2 plain": Configuration(both=2),
    "2 plain, twice the load": Configuration(both=2, rate=4.0),
    "2 plain, chunks of 128": Configuration(both=2, chunk=128),
    "2P1D": Configuration(2, 1),
    "1P2D": Configuration(1, 2),
    "1P1D, small KV caches": Configuration(1, 1, shared=0.9, documents=DOCUMENTS, kv_memory=SMALL),
    "1P1D, small KV caches, stores": Configuration(
        1,
        1,
        shared=0.9,
        documents=DOCUMENTS,
        kv_memory=SMALL,
        stores=(f"memory:24MiB?name=benchmark-{os.getpid()}", "file:{folder}"),
    ),
}


def make_trace(configuration: Configuration, duration_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals, prompts of 64 to 1,500 tokens and answers of 8 to 64, most of them short."""
    rng, now = random.Random(seed), 0.0
    arrivals: list[Arrival] = []
    while True:
        now += rng.expovariate(configuration.rate)
        if now > duration_s:
            return arrivals
        prompt = min(1500, max(64, int(rng.lognormvariate(5.7, 0.7))))
        blocks = -(-prompt // 512)
        first = 1000 + 8 * len(arrivals)
        if rng.random() < configuration.shared:
            first = -8 * rng.randrange(configuration.documents) if configuration.documents > 1 else 0
        ids = tuple(range(first, first + blocks))
        arrivals.append(Arrival(now, prompt, rng.randrange(8, 65), ids))


async def play(url: str, arrivals: Sequence[Arrival], num_warm: int) -> list[Streamed]:
    """Send the trace to a real fleet, each request at its time, after so many others that are not counted."""
    timeout, connector = aiohttp.ClientTimeout(total=None, sock_connect=10), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        for number in range(num_warm):
            warm = TracePrompt(Arrival(0.0, WARM_TOKENS, 8), 10**6 + number, 1, VOCABULARY)
            await stream_completion(session, url, model, list(warm), 8)
        begun = time.monotonic()

        async def one(number: int, arrival: Arrival) -> Streamed:
            prompt = list(TracePrompt(arrival, number, 0, VOCABULARY))
            await asyncio.sleep(begun + arrival.at_s - time.monotonic())
            return await stream_completion(session, url, model, prompt, arrival.answer_tokens)

        return await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(arrivals)))


def measured(answers: Sequence[Streamed]) -> dict[str, Percentiles]:
    """Percentiles of what the clients of the real fleet saw."""
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return {
        "ttft": Percentiles.of([answer.ttft for answer in answers]),
        "itl": Percentiles.of([gap for answer in answers for gap in answer.gaps]),
        "e2e": Percentiles.of([answer.token_times[-1] - answer.sent_at for answer in answers]),
    }


def calibrated() -> MachineTimes:
    """The times that `kvferry calibrate` measures now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "times.json")
        command = [sys.executable, "-m", "kvferry.cli.main", "calibrate", MODEL, "--write", str(path), "--rounds=2"]
        subprocess.run([*command, *KV, "--max-num-batched-tokens=512"], check=True, stderr=subprocess.DEVNULL)
        return read_times(path)


def brief(times: MachineTimes) -> MachineTimes:
    """Without the measurements."""
    step, transfer = times.step, msgspec.structs.replace(times.transfer, samples=[])
    spreads = {name: [round(point, 3) for point in getattr(step, name)] for name in ("decode_spread", "prefill_spread")}
    return msgspec.structs.replace(times, samples=[], transfer=transfer, step=msgspec.structs.replace(step, **spreads))


def run_real(configuration: Configuration, options: argparse.Namespace) -> dict[str, Any]:
    """The latencies of clients of a real fleet."""
    arrivals = make_trace(configuration, options.seconds, options.seed)
    with configuration.running() as url:
        results = measured(asyncio.run(play(url, arrivals, configuration.num_warm)))
    return {name: rounded(figures) for name, figures in results.items()}


def simulate(configuration: Configuration, times: MachineTimes, options: argparse.Namespace) -> dict[str, Any]:
    """The latencies that the simulator predicts."""
    arrivals = make_trace(configuration, options.seconds, options.seed)
    world = replace(world_of(fleet_from(configuration.spec()), times), num_cores=os.cpu_count() or 1)
    figures = TraceReplay(world, arrivals).run(Targets())
    assert figures.complete == len(arrivals), figures.reasons
    return {name: rounded(getattr(figures, name)) for name in LATENCIES}


def rounded(percentiles: Percentiles) -> dict[str, float]:
    """To microseconds."""
    return {name: round(seconds, 6) for name, seconds in msgspec.structs.asdict(percentiles).items()}


def mean(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of percentiles that were found several times."""
    return {
        latency: {name: statistics.mean(each[latency][name] for each in runs) for name in PERCENTILES}
        for latency in LATENCIES
    }


def errors(real: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The relative errors of the other's percentiles."""
    return {
        f"{latency} {name}": round(other[latency][name] / real[latency][name] - 1, 4)
        for latency in LATENCIES
        for name in PERCENTILES
    }


def show(name: str, result: dict[str, Any]) -> None:
    """One line of Markdown."""
    real, simulated = result["real"], mean(result["simulated"])
    cells = []
    for latency in LATENCIES:
        for name in PERCENTILES:
            milliseconds = " / ".join(f"{side[latency][name] * 1e3:.1f}" for side in (real, simulated))
            cells.append(f"{milliseconds} ({errors(real, simulated)[f'{latency} {name}']:+.0%})")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def summarize(what: str, errors: Sequence[dict[str, float]]) -> None:
    """A line of Markdown: the median of these errors, the largest, and how many keep the goals."""
    cells = []
    for latency in LATENCIES:
        for name, goal in GOALS.items():
            off = sorted(abs(each[f"{latency} {name}"]) for each in errors)
            within = sum(each <= goal for each in off)
            cells.append(f"{statistics.median(off):.0%}, {off[-1]:.0%}, {within} of {len(off)}")
    print(f"| {what} | " + " | ".join(cells) + " |")


def head() -> str:
    """The first lines of the table."""
    names = [f"{latency.upper()} {percentile.upper()}" for latency in LATENCIES for percentile in PERCENTILES]
    return f"| real / simulated, ms | {' | '.join(names)} |\n" + "|---" * (len(names) + 1) + "|"


def plot(results: dict[str, Any], path: Path) -> None:
    """Simulated over measured, a point for each fleet and percentile, with the border of 10 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure, panels = plt.subplots(1, 3, figsize=(12, 4.2))
    for axes, latency in zip(panels, LATENCIES, strict=True):
        seen: list[float] = []
        for percentile, marker in zip(PERCENTILES, "os^", strict=True):
            real = [result["real"][latency][percentile] * 1e3 for result in results.values()]
            simulated = [mean(result["simulated"])[latency][percentile] * 1e3 for result in results.values()]
            axes.scatter(real, simulated, marker=marker, label=percentile.upper(), s=28)
            seen += [*real, *simulated]
        low, high = 0.8 * min(seen), 1.25 * max(seen)
        axes.plot([low, high], [low, high], color="black", linewidth=0.8)
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], alpha=0.15, color="grey")
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set(title=latency.upper(), xlabel="measured, ms", ylabel="simulated, ms")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(True, alpha=0.25)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Calibrate, then all fleets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of each trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=Path, nargs="+", help="files of kvferry calibrate; default: measure them")
    parser.add_argument("--again", action="store_true", help="keep what was measured of the real fleets")
    parser.add_argument("--note", default="", help="kept with the results: what else the machine did")
    options = parser.parse_args()
    print_machine()
    results: dict[str, Any] = earlier("simulated", {})
    times = [read_times(path) for path in options.times or ()]
    print(head())
    after = [] if times or options.again else [calibrated()]
    for first in range(0, len(options.only), TOGETHER):
        names, before = options.only[first : first + TOGETHER], after
        for name in () if options.again else names:
            earlier_result = results.get(name, {})
            results[name] = {"before": earlier_result.get("real"), "real": run_real(CONFIGURATIONS[name], options)}
        after = [calibrated()] if before else []
        for name in names:
            figures = results[name]
            if fits := times or before + after:
                figures["times"] = msgspec.to_builtins([brief(fit) for fit in fits])
            fits = msgspec.convert(figures["times"], list[MachineTimes])
            figures["simulated"] = [simulate(CONFIGURATIONS[name], fit, options) for fit in fits]
            show(name, figures)
        saved = save(
            "simulated", {"model": MODEL, "seconds": options.seconds, "seed": options.seed}, results, in_lines=True
        )
    print("\n| median, largest, within the goal |" + head().partition("ms |")[2])
    fleets = [result for result in results.values() if "simulated" in result]
    summarize("error", [errors(result["real"], mean(result["simulated"])) for result in fleets])
    if all(result["before"] for result in fleets):
        summarize("measured before", [errors(result["real"], result["before"]) for result in fleets])
    summarize(
        "calibrated before and after", [errors(result["simulated"][-1], result["simulated"][0]) for result in fleets]
    )
    picture = RESULTS / f"simulated.{processor()}.png"
    plot({name: result for name, result in results.items() if "simulated" in result}, picture)
    print(f"wrote {saved} and {picture}")


if __name__ == "__main__":
    main()
