"""Do other people's long prompts stall an answer?

Streams of decode run all the time while long prompts arrive at random. Measured: the time between two tokens of the
streams (ITL), on

  1P+1D      a prefill and a decode instance, one core each
  2 plain    two instances that do both, one core each; whole prompts in one step, and cut into chunks of each size

behind the same router, with the same traffic, in one run. Prints a table, writes results/isolation.<processor>.json
and a picture of the same name.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from load import Mix, MixResult, run_mix
from models import SHAPE, make_bench_model
from report import print_machine, save
from served import disaggregated, replicas

SPLIT, WHOLE = "1P+1D", "2 plain, whole"
WARM_UP_S = 5.0
DRAWN_S = 20.0
"""How much of each run the picture shows."""


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
    results: dict[str, MixResult] = {}
    with tempfile.TemporaryDirectory() as folder, progress_bar() as bars:
        model = make_bench_model(Path(folder))
        common = ["--served-model-name", "bench", "--dtype", options.dtype, "--kv-cache-memory", "1GiB"]
        compared = sides(model, common, options.chunks)
        task = bars.add_task("", total=len(compared) * (WARM_UP_S + mix.duration_s))
        for number, (label, serving) in enumerate(compared.items()):
            bars.update(task, description=f"{label} ({number + 1} of {len(compared)})")
            with serving as url:
                asyncio.run(shown(bars, task, run_mix(url, "bench", replace(mix, duration_s=WARM_UP_S, seed=1))))
                results[label] = asyncio.run(shown(bars, task, run_mix(url, "bench", mix)))
            figures = "  ".join(f"{key} {value:8.1f}" for key, value in results[label].summary().items())
            print(f"{label:16s} {figures}", flush=True)
    summaries = {label: result.summary() for label, result in results.items()}
    path = save("isolation", {**asdict(mix), "dtype": options.dtype, "model": SHAPE}, summaries)
    picture = path.with_suffix(".png")
    plot(results, picture)
    report(summaries)
    print(f"wrote {path}, with all figures above, and {picture}, with gaps over time and the share of each length")


def progress_bar() -> Progress:
    """A bar on standard error that is drawn once a second, to leave the cores to what is measured; nothing at all where
    that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal)


async def shown(bars: Progress, task: TaskID, running: Coroutine[Any, Any, MixResult]) -> MixResult:
    """Wait for a run, and move the bar with the time."""
    run = asyncio.create_task(running)
    while not run.done():
        await asyncio.wait([run], timeout=1.0)
        bars.advance(task, 1.0)
    return run.result()


def sides(model: str, common: list[str], chunks: list[int]) -> dict[str, AbstractContextManager[str]]:
    """The compared servers, by name; none is started yet."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    servers: dict[str, AbstractContextManager[str]] = {
        SPLIT: disaggregated(model, *common, "--max-num-batched-tokens", "2048")
    }
    for label, chunk in {WHOLE: 4096, **{f"2 plain, {chunk}": chunk for chunk in chunks}}.items():
        limits = ["--max-num-batched-tokens", str(chunk), "--max-num-seqs", "32"]
        servers[label] = replicas(model, cores, *common, *limits)
    return servers


def report(summaries: dict[str, Any]) -> None:
    """The comparison in one sentence."""
    plain = {label: summary["itl_p99_ms"] for label, summary in summaries.items() if label != SPLIT}
    best = min(plain, key=lambda label: plain[label])
    split = summaries[SPLIT]["itl_p99_ms"]
    print(f"P99 ITL: 1P+1D {split:.1f} ms; best of two plain instances ({best}) {plain[best]:.1f} ms,", end=" ")
    print(f"whole prompts {plain[WHOLE]:.1f} ms")


def plot(results: dict[str, MixResult], path: Path) -> None:
    """On the left each gap at its time, on P/D, with whole prompts and in the largest chunks; on the right, for all
    sides, the share of gaps that are longer than x, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 4.8))
    columns = figure.add_gridspec(3, 2, width_ratios=(1.15, 1))
    drawn = {label: results[label] for label in dict.fromkeys((SPLIT, WHOLE, list(results)[-1]))}
    colours = {label: "black" if label == SPLIT else f"C{number}" for number, label in enumerate(results)}
    longest = max(max(stream.gaps) for result in drawn.values() for stream in result.streams) * 1e3
    for row, (label, result) in enumerate(drawn.items()):
        axes = figure.add_subplot(columns[row, 0])
        begin = min(stream.sent_at for stream in result.streams)
        for stream in result.streams:
            gaps = [gap * 1e3 for gap in stream.gaps]
            axes.vlines([time - begin for time in stream.token_times[1:]], 0, gaps, colors=colours[label], linewidth=1)
        axes.set(xlim=(0, DRAWN_S), ylim=(0, longest * 1.05), ylabel="ms")
        axes.set_title(label, loc="left", fontsize=10, fontweight="bold")
        axes.tick_params(labelbottom=row == len(drawn) - 1)
    axes.set_xlabel("seconds; each line is a gap between two tokens of an answer")
    axes = figure.add_subplot(columns[:, 1])
    for label, result in results.items():
        ordered = sorted(gap * 1e3 for stream in result.streams for gap in stream.gaps)
        shares = [1 - index / len(ordered) for index in range(len(ordered))]
        axes.loglog(ordered, shares, label=label, color=colours[label], linewidth=2.4 if label == SPLIT else 1.2)
    axes.set(xlabel="time between two tokens, ms", ylabel="share of gaps that are longer", ylim=(1e-4, 1))
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
