"""`kvferry plan`: which fleet serves a recorded trace within its targets, found in the simulator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from kvferry.cli.cache.plot import check_plot
from kvferry.cli.planning.plan_plot import plot_grid
from kvferry.cli.planning.simulate import (
    SEED,
    FromFlag,
    JsonFlag,
    LastsFlag,
    RateFlag,
    SeedFlag,
    SloFlag,
    TimesFlag,
    TraceFile,
    TracePart,
    progress,
    times_of,
)
from kvferry.cli.planning.simulated import world_of
from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import Bounds
from kvferry.core.settings.toml_file import to_toml
from kvferry.fleet.control.spec import fleet_from
from kvferry.sim.planner import Candidate, Findings, Planner, Tried, bandwidth, busiest
from kvferry.sim.targets import parse_targets
from kvferry.sim.times import MachineTimes
from kvferry.sim.traffic import Arrival, part_of

BUDGET, SHARE, REQUESTS = Bounds(1, 256), Bounds(0, 1, above=True), Bounds(1, 10**6)
_KEPT = ("kv_cache_memory", "dtype", "block_size", "max_num_seqs", "num_threads")
"""Settings of the engine that was measured which a plan keeps."""


def plan(
    trace: TraceFile,
    *,
    slo: SloFlag = "ttft=2s,itl=50ms",
    budget: Annotated[int, Parameter(help="Most instances.")] = 8,
    share: Annotated[float, Parameter(help="Share of the requests that is to be within the targets.")] = 0.99,
    times: TimesFlag = None,
    model: Annotated[str | None, Parameter(help="The model in the spec. Default: that of the times.")] = None,
    write: Annotated[Path | None, Parameter(help="Write the fleet's spec (TOML), for `kvferry fleet apply`.")] = None,
    plot_file: Annotated[
        Path | None,
        Parameter(name="--plot", help="Write a plot of the goodput grid: .svg or .png (needs kvferry[plot])."),
    ] = None,
    requests: Annotated[
        int, Parameter(help="Of a longer trace, simulate the part in which so many requests come the fastest.")
    ] = 1000,
    from_s: FromFlag = 0.0,
    for_s: LastsFlag = None,
    speed: RateFlag = 1.0,
    seed: SeedFlag = 0,
    json: JsonFlag = False,
) -> int:
    """Find the cheapest fleet that serves a trace within its targets: how many instances, prefill and decode apart or
    not, and the size of their chunks. Says so where there is no reason to disaggregate.

    Deployments that may keep up, by the times of their steps, are run in the simulator:

        kvferry calibrate MODEL --write times.json

        kvferry plan trace.jsonl --slo ttft=2s,itl=50ms --budget 8 --times times.json --write chat.toml

    The exit code is 1 if no fleet within the budget keeps the targets.
    """
    part = TracePart(trace, from_s, for_s, speed)
    for name, bounds, value in (("budget", BUDGET, budget), ("share", SHARE, share), ("requests", REQUESTS, requests)):
        bounds.require(f"--{name}", value)
    SEED.require("--seed", seed)
    targets = parse_targets(slo)
    if plot_file is not None:
        check_plot(plot_file)
    measured = times_of(times)
    arrivals = part.read()
    first_s, lasts_s = busiest(arrivals, requests)
    chosen = part_of(arrivals, first_s=first_s, last_s=first_s + lasts_s)
    with progress("planning") as on_progress:
        planner = Planner(
            chosen,
            measured,
            targets,
            lambda one: world_of(fleet_from(spec_of(one, measured, model)), measured),
            share=share,
            seed=seed,
            on_progress=lambda what, done: on_progress(done, what),
        )
        found = planner.search(budget)
    spec = to_toml(spec_of(found.chosen.candidate, measured, model))
    if write is not None:
        _write(write, spec)
    if plot_file is not None:
        plot_grid(found, plot_file)
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(_as_json(found, spec))) + b"\n")
    else:
        _show(found, arrivals, chosen, first_s, measured, spec, budget, write)
    return 0 if found.holds else 1


def spec_of(candidate: Candidate, times: MachineTimes, model: str | None = None) -> dict[str, Any]:
    """A deployment as a fleet's spec, with the settings of the engine that was measured."""
    kept = [f"--{name.replace('_', '-')}={times.settings[name]}" for name in _KEPT if name in times.settings]
    chunk = [f"--max-num-batched-tokens={candidate.chunk}"]
    counts = {"prefill": candidate.prefill, "decode": candidate.decode, "both": candidate.both}
    roles = {
        role: {"count": number, **({"args": chunk} if role != "decode" else {})}
        for role, number in counts.items()
        if number
    }
    return {
        "name": "planned",
        "model": model or times.model,
        "mode": "pooling",
        **({"engine": {"args": kept}} if kept else {}),
        "role": roles,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror or error}") from error


def _as_json(found: Findings, spec: str) -> dict[str, Any]:
    return {
        "holds": found.holds,
        "reason": found.reason(),
        "unreachable": found.unreachable(),
        "spec": spec,
        "tried": [{"deployment": str(one.candidate), "figures": one.figures} for one in found.tried],
        "grid": [
            {"ttft": ttft, "itl": itl, "plain": plain, "split": split}
            for ttft, row in found.grid()
            for itl, plain, split in row
        ],
    }


def _show(
    found: Findings,
    arrivals: list[Arrival],
    chosen: list[Arrival],
    first_s: float,
    times: MachineTimes,
    spec: str,
    budget: int,
    write: Path | None,
) -> None:
    console = Console(highlight=False)
    if len(chosen) < len(arrivals):
        console.print(
            f"Of {len(arrivals)} requests, the {len(chosen)} that come the fastest, from second {first_s:.0f} on, for"
            f" {chosen[-1].at_s:.0f} s.",
            soft_wrap=True,
        )
    console.print(_table(found))
    if found.plain is not None and found.split is not None:
        console.print(_grid(found))
    if not found.holds:
        console.print(f"No deployment of up to {budget} instances keeps {found.share:.1%}.", style="yellow")
        if found.unreachable():
            console.print(found.unreachable(), soft_wrap=True)
    console.print(f"\n[bold]{found.reason()}[/bold]", soft_wrap=True)
    console.print(_bandwidth(found.chosen, chosen, times), soft_wrap=True)
    console.print(f"\n{spec}" if write is None else f"\nwritten to {write}", soft_wrap=True, markup=False)


def _table(found: Findings) -> Table:
    table = Table(title=f"Goodput within {found.targets}", title_justify="left")
    table.add_column("deployment", no_wrap=True)
    for name in ("within", "goodput/s", "for each instance", "TTFT P99, ms", "ITL P99, ms", "busiest"):
        table.add_column(name, justify="right")
    for one in found.tried:
        figures, number = one.figures, one.candidate.num_instances
        table.add_row(
            str(one.candidate),
            f"{figures.within:.1%}",
            f"{figures.goodput:.2f}",
            f"{figures.goodput / number:.2f}",
            f"{figures.ttft.p99 * 1e3:.0f}",
            f"{figures.itl.p99 * 1e3:.1f}",
            f"{max(role.busy for role in figures.roles.values()):.0%}",
            style="bold" if one is found.chosen else "",
        )
    return table


def _grid(found: Findings) -> Table:
    """Shares within multiples of the targets: plain, then split."""
    assert found.plain is not None
    assert found.split is not None
    title = f"Share within multiples of the targets: {found.plain.candidate} / {found.split.candidate}"
    table = Table(title=title, title_justify="left")
    rows = list(found.grid())
    table.add_column("TTFT, ITL:")
    for itl, _, _ in rows[0][1]:
        table.add_column(f"x {itl:g}", justify="right")
    for ttft, row in rows:
        table.add_row(f"x {ttft:g}", *(f"{plain:.0%} / {split:.0%}" for _, plain, split in row))
    return table


def _bandwidth(one: Tried, arrivals: list[Arrival], times: MachineTimes) -> str:
    needs = bandwidth(arrivals, times.kv.token_bytes)
    hits = max(role.prefix_hits for role in one.figures.roles.values())
    lines = []
    if one.candidate.is_split:
        lines.append(
            f"P2P: {_rate(needs.p2p)} from P to D in the busiest ten seconds,"
            f" {_rate(needs.p2p / one.candidate.prefill)} for each P"
        )
    if needs.reused:
        lines.append(
            f"a store without bounds (not simulated) would have {needs.reused:.0%} of the prompts' tokens, the prefix"
            f" caches have {hits:.0%}: {_rate(needs.store_reads)} of reads, {_rate(needs.store_writes)} of writes"
        )
    else:
        lines.append("no prompt of the trace is known to begin like another: a store would find nothing")
    return "\n".join(lines)


def _rate(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB/s" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB/s"
