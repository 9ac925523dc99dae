"""Do other people's long prompts stall an answer?

Streams of decode run all the time while long prompts arrive at random. Measured: the time between two tokens of the
streams (ITL), on

  1P+1D      a prefill and a decode instance, one core each
  2 plain    two instances that do both, one core each; whole prompts in one step, and cut into chunks of each size

behind the same router, with the same traffic, in one run. Prints a table, writes results/isolation.json and a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load import Mix, MixResult, run_mix
from models import SHAPE, make_bench_model
from report import RESULTS, print_machine, save
from served import disaggregated, replicas


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each run")
    parser.add_argument("--chunks", type=int, nargs="*", default=[64, 128, 256, 512], help="chunk sizes of the sweep")
    parser.add_argument("--streams", type=int, default=4, help="decode streams that are always there")
    parser.add_argument("--long-tokens", type=int, default=1024, help="tokens of a long prompt")
    parser.add_argument("--long-per-s", type=float, default=1.0, help="long prompts that arrive in a second")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def measure(label: str, url: str, mix: Mix) -> tuple[dict[str, float], MixResult]:
    """One run; a short one before it warms everything up."""
    asyncio.run(run_mix(url, "bench", Mix(**{**asdict(mix), "duration_s": 5.0, "seed": 1})))
    result = asyncio.run(run_mix(url, "bench", mix))
    summary = result.summary()
    figures = "  ".join(f"{key} {value:8.1f}" for key, value in summary.items())
    print(f"{label:16s} {figures}", flush=True)
    return summary, result


def main() -> None:
    """All sides, one after the other."""
    options = parse()
    mix = Mix(
        num_streams=options.streams,
        stream_prompt_tokens=64,
        stream_tokens=256,
        long_prompt_tokens=options.long_tokens,
        long_tokens=8,
        long_per_s=options.long_per_s,
        duration_s=options.seconds,
        vocab_size=SHAPE["vocab_size"],
    )
    print_machine()
    summaries: dict[str, Any] = {}
    gaps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_bench_model(Path(folder))
        common = ["--served-model-name", "bench", "--dtype", options.dtype, "--kv-cache-memory", "1GiB"]
        for label, serving in sides(model, common, options.chunks).items():
            with serving as url:
                summaries[label], result = measure(label, url, mix)
                gaps[label] = [gap for stream in result.streams for gap in stream.gaps]
    path = save("isolation", {**asdict(mix), "dtype": options.dtype, "model": SHAPE}, summaries)
    plot(gaps, RESULTS / "isolation.png")
    print(f"wrote {path} and {RESULTS / 'isolation.png'}")
    report(summaries)


def sides(model: str, common: list[str], chunks: list[int]) -> dict[str, AbstractContextManager[str]]:
    """What is compared, by name; nothing is started yet."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    found: dict[str, AbstractContextManager[str]] = {
        "1P+1D": disaggregated(model, *common, "--max-num-batched-tokens", "2048")
    }
    for label, chunk in {"2 plain, whole": 4096, **{f"2 plain, {chunk}": chunk for chunk in chunks}}.items():
        limits = ["--max-num-batched-tokens", str(chunk), "--max-num-seqs", "32"]
        found[label] = replicas(model, cores, *common, *limits)
    return found


def report(summaries: dict[str, Any]) -> None:
    """The comparison in one sentence."""
    plain = {label: one["itl_p99_ms"] for label, one in summaries.items() if label != "1P+1D"}
    best = min(plain, key=lambda label: plain[label])
    split = summaries["1P+1D"]["itl_p99_ms"]
    print(f"P99 ITL: 1P+1D {split:.1f} ms; best of two plain instances ({best}) {plain[best]:.1f} ms,", end=" ")
    print(f"whole prompts {plain['2 plain, whole']:.1f} ms")


def plot(gaps: dict[str, list[float]], path: Path) -> None:
    """Share of gaps longer than x, both axes logarithmic: tails are what matters."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for label, values in gaps.items():
        ordered = sorted(values)
        shares = [1 - index / len(ordered) for index in range(len(ordered))]
        style = {"linewidth": 2.4, "color": "black"} if label == "1P+1D" else {"linewidth": 1.2}
        axes.loglog([value * 1e3 for value in ordered], shares, label=label, **style)
    axes.set_xlabel("time between two tokens, ms")
    axes.set_ylabel("share of gaps that are longer")
    axes.set_ylim(1e-4, 1)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
