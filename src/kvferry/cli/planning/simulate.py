"""`kvferry simulate`: runs a recorded trace on a simulated fleet, on a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvferry.cli.bars import ProgressLines, make_bars
from kvferry.cli.planning.simulated import ASSUMED, world_of
from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import SECONDS, SECONDS_OR_ZERO, Bounds
from kvferry.core.settings.units import percent
from kvferry.fleet.spec.fleet_spec import DesiredFleet, read_fleet, seconds
from kvferry.sim.replay import Percentiles, ReplayFigures, TraceReplay
from kvferry.sim.targets import Targets, parse_targets
from kvferry.sim.times import MachineTimes, read_times
from kvferry.sim.traffic import Arrival, faster, part_of, read_traffic, require_short_pauses

DEFAULT_SLO = "ttft=2s,itl=50ms"
SPEED = Bounds(0, 1e6, above=True)
SEED = Bounds(0, 2**63 - 1)
CORES = Bounds(0, 4096)

TraceFile = Annotated[
    Path, Parameter(help="Recorded requests: JSON lines in Mooncake's format, or CSV in the format of Azure's traces.")
]
_SLO = (
    "Targets, such as ttft=2s,itl=50ms: time to the first token, mean time between two tokens of an answer, and e2e,"
    " time to the last token. A request is within them if it meets all."
)
SloFlag = Annotated[str, Parameter(help=_SLO)]
SeedFlag = Annotated[int, Parameter(help="Decides everything that is random; the same seed gives the same events.")]
TimesFlag = Annotated[
    Path | None, Parameter(help="Measured times of the model on the machine, a file of `kvferry calibrate`.")
]
JsonFlag = Annotated[bool, Parameter(help="Print JSON instead of tables.", negative=())]
FromFlag = Annotated[float, Parameter(help="Leave out what arrives before this second of the trace.")]
LastsFlag = Annotated[float | None, Parameter(help="Seconds of the trace to use. Default: all.")]
RateFlag = Annotated[float, Parameter(help="Have requests arrive this many times as fast as they were recorded.")]


def simulate(
    spec: Annotated[Path, Parameter(help="The fleet's file (TOML), as `kvferry fleet apply` takes it.")],
    *,
    trace: TraceFile,
    slo: Annotated[
        str | None, Parameter(help=f"{_SLO} Default: the targets of the spec's [scale]; without it, {DEFAULT_SLO}.")
    ] = None,
    times: TimesFlag = None,
    seed: SeedFlag = 0,
    from_s: FromFlag = 0.0,
    for_s: LastsFlag = None,
    speed: RateFlag = 1.0,
    cores: Annotated[
        int,
        Parameter(
            help="Cores of the one machine that all instances are on; if they are fewer, instances share them, as those"
            " of `kvferry serve` do. Default: each instance has its own."
        ),
    ] = 0,
    json: JsonFlag = False,
) -> int:
    r"""Run a recorded trace on a fleet's spec, on a virtual clock, and show the latencies that clients would see.

    The router, the servers, the engine's scheduler, its blocks and the connector are kvferry's own code; the forward
    pass, bytes on a wire and the start of a process only take the time that was measured. With a table [scale] in the
    spec, the fleet's own controller changes the counts while the trace runs:

        kvferry calibrate MODEL --write times.json

        kvferry simulate chat.toml --trace trace.jsonl \
          --slo ttft=2s,itl=50ms --times times.json
    """
    part = TracePart(trace, from_s, for_s, speed)
    SEED.require("--seed", seed)
    CORES.require("--cores", cores)
    fleet = read_fleet(spec)
    targets = targets_of(fleet, slo)
    if cores and fleet.scale is not None:
        raise ConfigError("--cores is not simulated with [scale], whose instances come and go; leave one of them out")
    measured = times_of(times)
    arrivals = part.read()
    world = replace(world_of(fleet, measured), num_cores=cores)
    with progress(f"{len(arrivals)} requests") as on_progress:
        replay = TraceReplay(world, arrivals, seed=seed, fleet=None if fleet.scale is None else fleet)
        figures = replay.run(targets, on_progress)
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
        return 0
    console = Console(highlight=False)
    console.print(_latencies(figures, targets))
    console.print(_roles(figures))
    for decision in figures.decisions:
        console.print(f"{decision.at:7.0f} s  {decision.what}: {decision.reason}", soft_wrap=True)
    console.print(in_words(figures), soft_wrap=True)
    return 0


def targets_of(fleet: DesiredFleet, slo: str | None) -> Targets:
    """The targets by which a fleet is judged. Raises `ConfigError`."""
    if slo is None and fleet.scale is not None:
        return Targets(ttft=seconds(fleet.scale.ttft), itl=seconds(fleet.scale.itl))
    return parse_targets(DEFAULT_SLO if slo is None else slo)


def times_of(path: Path | None) -> MachineTimes:
    """The times in a file. Without a file: assumed times, which were not measured on a machine, with a warning."""
    if path is not None:
        return read_times(path)
    sys.stderr.write(
        "kvferry: warning: no --times: the figures are of no machine that exists; measure yours with"
        " `kvferry calibrate`\n"
    )
    return ASSUMED


@dataclass(frozen=True)
class TracePart:
    """The part of a trace that the flags select. Raises `ConfigError`."""

    path: Path
    from_s: float
    for_s: float | None
    speed: float

    def __post_init__(self) -> None:
        SECONDS_OR_ZERO.require("--from-s", self.from_s)
        SPEED.require("--speed", self.speed)
        if self.for_s is not None:
            SECONDS.require("--for-s", self.for_s)

    def read(self) -> list[Arrival]:
        """Read the requests of this part. Raises `ConfigError`."""
        until_s = None if self.for_s is None else self.from_s + self.for_s
        arrivals = faster(part_of(read_traffic(self.path), from_s=self.from_s, until_s=until_s), self.speed)
        require_short_pauses(arrivals)
        return arrivals


class OnProgress(Protocol):
    """Called with the share that is done, and with a text when the current task changes."""

    def __call__(self, share: float, label: str | None = None) -> None: ...


@contextmanager
def progress(label: str) -> Iterator[OnProgress]:
    """Progress on standard error: a bar on a terminal, otherwise a line from time to time."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with make_bars(*columns) as bars:
        if bars.disable:
            yield ProgressLines(label)
        else:
            task = bars.add_task(label, total=1.0)
            yield lambda share, label=None: bars.update(task, completed=share, description=label)


def _latencies(figures: ReplayFigures, targets: Targets) -> Table:
    table = Table(title=f"{percent(figures.within)}% of requests within {targets}", title_justify="left")
    table.add_column("milliseconds")
    for name in ("P50", "P90", "P99", "mean", "target"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Percentiles, float | None]] = [
        ("time to first token", figures.ttft, targets.ttft),
        ("between two tokens", figures.itl, targets.itl),
        ("to the last token", figures.e2e, targets.e2e),
    ]
    for name, spread, target in rows:
        values = (spread.p50, spread.p90, spread.p99, spread.mean)
        table.add_row(name, *(f"{value * 1e3:.1f}" for value in values), "" if target is None else f"{target * 1e3:g}")
    return table


def _roles(figures: ReplayFigures) -> Table:
    table = Table()
    for name in ("role", "instances", "busy", "KV in use, mean", "most", "prefix found", "preempted"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role, role_figures in figures.roles.items():
        shares = (
            f"{share:.1%}"
            for share in (role_figures.busy, role_figures.kv_mean, role_figures.kv_peak, role_figures.prefix_hits)
        )
        number = (
            str(role_figures.instances)
            if role_figures.fewest == role_figures.instances
            else f"{role_figures.fewest} to {role_figures.instances}"
        )
        table.add_row(role, number, *shares, str(role_figures.preemptions))
    return table


def in_words(figures: ReplayFigures) -> str:
    """The results that are in no table, in words."""
    answered = f"{figures.complete} of {figures.requests} requests answered"
    failed = "".join(f"\n  {number} x {reason}" for reason, number in figures.reasons.items())
    stores = ", ".join(f"{number} {noun}" for noun, number in figures.stores.items())
    stored = f"; blocks of stores: {stores}" if any(figures.stores.values()) else ""
    scaled = ""
    if figures.decisions:
        by_role = ", ".join(f"{role_figures.instance_s:.0f} {role}" for role, role_figures in figures.roles.items())
        fixed_s = figures.most_instances * figures.duration_s
        scaled = f" ({by_role}; {fixed_s:.0f} with {figures.most_instances} instances all the time)"
    wrong = "".join(f"\nkvferry logged an error: {line}" for line in figures.errors)
    return (
        f"{answered} in {figures.duration_s:.0f} s, {figures.goodput:.2f} a second within the targets;"
        f" {figures.hand_offs} hand-offs, {figures.instance_s:.0f} instance-seconds{scaled}{stored}{failed}{wrong}"
    )
