"""`kvferry plan`: finds in the simulator which fleet serves a recorded trace within its targets."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from kvferry.cli.cache.plot import check_plot
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
from kvferry.core.settings.files import require_writable
from kvferry.core.settings.toml_file import to_toml
from kvferry.core.settings.units import percent
from kvferry.fleet.spec.fleet_spec import fleet_from
from kvferry.fleet.spec.keys import ENGINE_KEYS, read_keys
from kvferry.sim.kv_traffic import KVPlan, StoreUse, plan_kv, to_size
from kvferry.sim.planner import Candidate, Planner, SearchResult, busiest
from kvferry.sim.targets import parse_targets
from kvferry.sim.times import MachineTimes
from kvferry.sim.traffic import Arrival
from kvferry.sim.world import WorldSpec

BUDGET, SHARE, REQUESTS = Bounds(1, 256), Bounds(0, 1, above=True), Bounds(1, 10**6)
_KEPT = (
    *("kv_cache_memory", "dtype", "block_size", "max_num_seqs", "num_threads", "max_model_len"),
    *("device", "trust_remote_code", "batch_invariant", "prefix_caching", "prefix_cache_eviction"),
)
"""Settings of the measured engine that a plan keeps."""
_MAX_MEMORY = 2**40
"""Maximum bytes of a store in the memory of one machine."""
_MODEL_COMMENT = '# Put the model that it is to serve in the place of "assumed", or give --model.\n'
_STORE_COMMENT = """
# The store: memory: is shared by the instances of one machine; file: by instances that share the directory; valkey://
# and mooncake:// by instances on several machines.
"""


def plan(
    trace: TraceFile,
    *,
    slo: SloFlag = "ttft=2s,itl=50ms",
    budget: Annotated[int, Parameter(help="Most instances.")] = 8,
    share: Annotated[float, Parameter(help="Share of the requests that is to be within the targets.")] = 0.99,
    times: TimesFlag = None,
    model: Annotated[str | None, Parameter(help="The model in the spec. Default: the model of --times.")] = None,
    write: Annotated[Path | None, Parameter(help="Write the fleet's spec (TOML), for `kvferry fleet apply`.")] = None,
    plot_file: Annotated[
        Path | None,
        Parameter(name="--plot", help="Write a plot of the goodput grid: .svg or .png (needs kvferry[plot])."),
    ] = None,
    requests: Annotated[
        int, Parameter(help="Of a longer trace, simulate the part in which this many requests come the fastest.")
    ] = 1000,
    from_s: FromFlag = 0.0,
    for_s: LastsFlag = None,
    speed: RateFlag = 1.0,
    seed: SeedFlag = 0,
    json: JsonFlag = False,
) -> int:
    r"""Find the cheapest fleet that serves a trace within its targets: how many instances, prefill and decode apart or
    not, the size of their chunks, the settings of the router, and how KV is moved and kept. Says so if there is no
    reason to disaggregate, and if a store would not be useful.

    Deployments that can keep up, by the times of their steps, are run in the simulator. The hits of a store are
    computed from the trace:

        kvferry calibrate MODEL --write times.json

        kvferry plan trace.jsonl --slo ttft=2s,itl=50ms --budget 8 \
          --times times.json --write chat.toml

    The exit code is 1 if no fleet within the budget keeps the targets.
    """
    part = TracePart(trace, from_s, for_s, speed)
    for name, bounds, value in (("budget", BUDGET, budget), ("share", SHARE, share), ("requests", REQUESTS, requests)):
        bounds.require(f"--{name}", value)
    SEED.require("--seed", seed)
    targets = parse_targets(slo)
    if write is not None:
        if model is None and times is None:
            raise ConfigError("--write: say with --model which model the spec is to serve, as there are no --times")
        require_writable("--write", write, trace=trace, times=times, plot=plot_file)
    if plot_file is not None:
        check_plot(plot_file)
    measured = times_of(times)
    arrivals = part.read()
    start_s, chosen = busiest(arrivals, requests)
    with progress("planning") as on_progress:
        planner = Planner(
            chosen,
            measured,
            targets,
            lambda candidate: _world(candidate, chosen, measured, model),
            share=share,
            seed=seed,
            on_progress=lambda phase, done: on_progress(done, phase),
        )
        result = planner.search(budget)
        candidate = result.chosen.candidate
        kv = plan_kv(
            arrivals, measured, candidate.chunk, candidate.prefill or candidate.both, is_split=candidate.is_split
        )
        if kv.store is not None:
            result = planner.with_store(result, kv.store.num_bytes)
    if not result.chosen.candidate.store_bytes:
        kv = replace(kv, way="P2P" if candidate.is_split else "nothing", store=None)
    spec = to_toml(spec_of(result.chosen.candidate, measured, model, write))
    spec += _STORE_COMMENT if kv.store is not None else ""
    if model is None and times is None:
        spec = _MODEL_COMMENT + spec
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(_as_json(result, kv, spec))) + b"\n")
    else:
        _show(result, kv, arrivals, chosen, start_s, measured, "" if write is not None else spec, budget)
        sys.stdout.flush()  # the results are printed even if the file cannot be written
    if write is not None:
        _write(write, spec)
        sys.stdout.write("" if json else f"\nwritten to {write}\n")
    if plot_file is not None:
        _plot_grid(result, plot_file)
    return 0 if result.holds else 1


def _world(candidate: Candidate, arrivals: list[Arrival], times: MachineTimes, model: str | None) -> WorldSpec:
    """A deployment in the simulator. Its store is at most as large as all blocks that it gets, because its index costs
    memory."""
    tokens = sum(arrival.prompt_tokens + arrival.answer_tokens + times.kv.block_size for arrival in arrivals)
    room = 1 << (tokens * times.kv.token_bytes).bit_length()
    smaller = replace(candidate, store_bytes=min(candidate.store_bytes, room))
    return world_of(fleet_from(spec_of(smaller, times, model)), times)


def spec_of(
    candidate: Candidate, times: MachineTimes, model: str | None = None, path: Path | None = None
) -> dict[str, Any]:
    """A deployment as a fleet's spec, with the settings of the measured engine. `path`: its file, after which the fleet
    is named, because applying a spec replaces a fleet of the same name."""
    store = {"kv_transfer_config": _with_store(candidate)} if candidate.store_bytes else {}
    measured = {name: times.settings[name] for name in _KEPT if name in times.settings}
    engine = {**read_keys("engine", measured, ENGINE_KEYS), **store}
    router = candidate.router.values()
    counts = {"prefill": candidate.prefill, "decode": candidate.decode, "both": candidate.both}
    ranks = {} if times.tensor_parallel_size == 1 else {"tensor_parallel_size": times.tensor_parallel_size}
    roles = {
        role: {"count": number, **ranks, "max_num_batched_tokens": candidate.chunk}
        for role, number in counts.items()
        if number
    }
    return {
        "name": "planned" if path is None else _name(path),
        "model": model or times.model,
        "mode": "pooling",
        **({"engine": engine} if engine else {}),
        **({"router": router} if router else {}),
        "role": roles,
    }


def _name(path: Path) -> str:
    """A name for a fleet that is as similar to the name of the file as possible."""
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower())[:40].strip("-") or "planned"


def _with_store(candidate: Candidate) -> str:
    """The connectors of a deployment with a store, as `kv_transfer_config` takes them."""
    size = to_size(candidate.store_bytes)
    url = f"memory:{size}" if candidate.store_bytes <= _MAX_MEMORY else f"file:/var/lib/kvferry?max_bytes={size}"
    store = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": url}}
    both = {"connectors": [{"kv_connector": "P2pConnector"}, store]}
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": both} if candidate.is_split else store
    return msgspec.json.encode(config).decode()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror or error}") from error


def _as_json(result: SearchResult, kv: KVPlan, spec: str) -> dict[str, Any]:
    return {
        "holds": result.holds,
        "reason": result.reason(),
        "router": result.router_reason(),
        "kv": kv,
        "store": result.store_reason(),
        "unreachable": result.unreachable(),
        "spec": spec,
        "tried": [
            {"deployment": str(deployment.candidate), "figures": deployment.figures} for deployment in result.tried
        ],
        "grid": [
            {"ttft": ttft, "itl": itl, "plain": plain, "split": split}
            for ttft, row in result.grid()
            for itl, plain, split in row
        ],
    }


def _show(
    result: SearchResult,
    kv: KVPlan,
    arrivals: list[Arrival],
    chosen: list[Arrival],
    start_s: float,
    times: MachineTimes,
    spec: str,
    budget: int,
) -> None:
    console = Console(highlight=False)
    if len(chosen) < len(arrivals):
        console.print(
            f"Of {len(arrivals)} requests, the {len(chosen)} that come the fastest, from second {start_s:.0f} on, for"
            f" {chosen[-1].at_s:.0f} s.",
            soft_wrap=True,
        )
    console.print(_table(result))
    if result.plain is not None and result.split is not None:
        console.print(_grid(result))
    if not result.holds:
        console.print(f"No deployment of up to {budget} instances keeps {100 * result.share:g}%.", style="yellow")
        if result.unreachable():
            console.print(result.unreachable(), soft_wrap=True)
    console.print(f"\n[bold]{result.reason()}[/bold]", soft_wrap=True)
    if result.router_reason():
        console.print(result.router_reason(), soft_wrap=True)
    console.print(f"KV: {_in_words(kv)}", soft_wrap=True)
    if result.store_reason():
        console.print(result.store_reason(), soft_wrap=True)
    if kv.hand_offs:
        console.print(_ways(kv, result.chosen.candidate.prefill))
    if kv.stores:
        console.print(_stores(kv))
        console.print(_break_even(kv.stores[-1], times), soft_wrap=True)
    if spec:
        console.print(f"\n{spec}", soft_wrap=True, markup=False)


def _table(result: SearchResult) -> Table:
    title = f"Goodput (requests/s, and for each instance) within {result.targets}; P99 of TTFT and ITL in ms"
    table = Table(title=title, title_justify="left")
    table.add_column("deployment", min_width=18)
    for name in ("within", "goodput", "each", "TTFT", "ITL", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for deployment in result.tried:
        figures, number = deployment.figures, deployment.candidate.num_instances
        table.add_row(
            str(deployment.candidate),
            f"{percent(figures.within)}%",
            f"{figures.goodput:.2f}",
            f"{figures.goodput / number:.2f}",
            f"{figures.ttft.p99 * 1e3:.0f}",
            f"{figures.itl.p99 * 1e3:.1f}",
            f"{max(role.busy for role in figures.roles.values()):.0%}",
            style="bold" if deployment is result.chosen else "",
        )
    return table


def _grid(result: SearchResult) -> Table:
    """Shares within multiples of the targets: plain, then split."""
    assert result.plain is not None
    assert result.split is not None
    title = f"Share within multiples of the targets: {result.plain.candidate} / {result.split.candidate}"
    table = Table(title=title, title_justify="left")
    rows = list(result.grid())
    table.add_column("TTFT, ITL:")
    for itl, _, _ in rows[0][1]:
        table.add_column(f"x {itl:g}", justify="right")
    for ttft, row in rows:
        table.add_row(f"x {ttft:g}", *(f"{plain:.0%} / {split:.0%}" for _, plain, split in row))
    return table


def _plot_grid(result: SearchResult, path: Path) -> None:
    """Plot the share of requests within multiples of the targets, in one panel for the plain and one for the
    disaggregated deployment, by matplotlib. Raises `ConfigError`."""
    from matplotlib.figure import Figure

    sides = [
        (deployment, index) for index, deployment in enumerate((result.plain, result.split)) if deployment is not None
    ]
    figure = Figure(figsize=(4.6 * len(sides), 4.0), layout="constrained")
    rows = list(result.grid())
    for axes, (side, index) in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides, strict=True):
        shares = [[cell[1 + index] or 0.0 for cell in row] for _, row in rows]
        axes.imshow(shares, vmin=0.0, vmax=1.0, cmap="RdYlGn", origin="lower")
        for y, row in enumerate(shares):
            for x, share in enumerate(row):
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(rows[0][1])), [f"x {cell[0]:g}" for cell in rows[0][1]])
        axes.set_yticks(range(len(rows)), [f"x {ttft:g}" for ttft, _ in rows])
        axes.set(title=str(side.candidate), xlabel="target between tokens", ylabel="target until the first token")
    figure.suptitle(f"share of requests within multiples of {result.targets}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error


def _in_words(kv: KVPlan) -> str:
    description = kv.way if kv.store is None else f"{kv.way} of {to_size(kv.store.num_bytes)}"
    return f"{description}: {kv.why}"


def _ways(kv: KVPlan, num_prefill: int) -> Table:
    table = Table(title="What hand-offs need, in the busiest ten seconds, at most", title_justify="left")
    table.add_column("by", no_wrap=True)
    for name in ("P2P", "of each P", "read from the store", "written to it"):
        table.add_column(name, justify="right")
    for way, p2p, reads, writes in kv.bandwidths():
        rates = (p2p, p2p / num_prefill, reads, writes)
        table.add_row(way, *(_rate(rate) if rate else "" for rate in rates), style="bold" if way == kv.way else "")
    return table


def _stores(kv: KVPlan) -> Table:
    title = "What a store would do for the whole trace (computed, not simulated)"
    table = Table(title=title, title_justify="left")
    table.add_column("size")
    for name in ("has of the prompts", "read, busiest 10 s", "written", "prefill saved, instances"):
        table.add_column(name, justify="right")
    if kv.caches is not None:
        name = f"prefix caches, {to_size(kv.caches.num_bytes)}"
        table.add_row(name, f"{kv.caches.hit_share:.0%}", "", "", f"{kv.caches.saves:.2f}")
    for store in kv.stores:
        row = (
            to_size(store.num_bytes),
            f"{store.hit_share:.0%}",
            _rate(store.reads),
            _rate(store.writes),
            f"{store.saves:.2f}",
        )
        table.add_row(*row, style="bold" if store is kv.store else "")
    return table


def _break_even(store: StoreUse, times: MachineTimes) -> str:
    basis = "were measured" if times.measured else "are assumed"
    min_rate = _rate(store.min_bandwidth)
    return (
        f"A store helps an instance only if it reads faster than {min_rate}, which is how fast KV is computed;"
        f" hand-offs {basis} at {_rate(times.transfer.bandwidth)}."
    )


def _rate(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB/s" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB/s"
