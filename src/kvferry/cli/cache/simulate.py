"""`kvferry cache simulate`: recorded requests replayed through eviction policies, with the same code that stores
use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvferry.cli.bars import make_bars
from kvferry.cli.cache.plot import check_plot, plot
from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import COUNT, Bounds
from kvferry.store.eviction.table import eviction_class, eviction_names
from kvferry.store.trace.comparison import Comparison, compare_file

DEFAULT_CAPACITIES = ("0.5M", "1M", "3M", "5M", "15M")
TOKENS = Bounds(1, 2**53)
_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg]?)", re.IGNORECASE)
_POWERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def simulate(
    trace: Annotated[
        Path, Parameter(help="Requests as JSON lines, in the format of the traces that Mooncake publishes.")
    ],
    *,
    capacity: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=True,
            negative=(),
            show_default=" ".join,
            help="Sizes of the cache in tokens, such as 500k or 3M; one or several.",
        ),
    ] = DEFAULT_CAPACITIES,
    policy: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=True,
            negative=(),
            show_default=False,
            help="Eviction policies by name, or module:Class; all that have a name if none is given.",
        ),
    ] = (),
    block_tokens: Annotated[int, Parameter(help="Tokens in a block of the trace.")] = 512,
    finishes: Annotated[
        bool,
        Parameter(help="Tell policies when answers are complete; a store outside of the engine does not know that."),
    ] = True,
    json: Annotated[bool, Parameter(help="Print JSON instead of a table.", negative=())] = False,
    plot_file: Annotated[
        Path | None, Parameter(name="--plot", help="Write a plot: .svg or .png (needs kvferry[plot]).")
    ] = None,
) -> None:
    """Replay recorded requests through eviction policies, and show the share of their blocks that each found.

    Also shows the largest share that any cache of the same size could have found (Belady's optimum), and the share of
    an unbounded cache.
    """
    COUNT.require("--block-tokens", block_tokens)
    names = policy or tuple(eviction_names())
    for name in names:
        eviction_class(name)
    if plot_file is not None:
        check_plot(plot_file)
    capacities = sorted({_tokens(text) for text in capacity})
    with _progress(trace) as on_read:
        comparison = compare_file(
            trace, names, capacities, block_tokens=block_tokens, uses_finishes=finishes, on_read=on_read
        )
    if plot_file is not None:
        plot(comparison, plot_file)
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")
    else:
        Console().print(_table(comparison, names))


def _tokens(text: str) -> int:
    match = _TOKENS.fullmatch(text)
    if match is None:
        raise ConfigError(f"--capacity {text!r} is not a number of tokens; write it as 500k, 3M or 3000000")
    number = float(match[1]) * _POWERS[match[2].lower()]
    TOKENS.require("--capacity", number)
    return int(number)


@contextmanager
def _progress(trace: Path) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal. Yields a function, to be called with the number of bytes
    that were read, in both passes."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    total = 2 * trace.stat().st_size if trace.is_file() else None
    with make_bars(*columns) as bars:
        task = bars.add_task("replaying", total=total)
        yield lambda num: bars.advance(task, num)


def _table(comparison: Comparison, names: Sequence[str]) -> Table:
    """Hit ratios, a row for each policy and a column for each size."""
    caption = f"{comparison.requests} requests, {comparison.blocks} blocks of {comparison.block_tokens} tokens"
    title = f"Share of blocks found\n{caption}, {comparison.different_blocks} different"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for tokens in comparison.optimal_hit_ratio:
        table.add_column(_label(tokens), justify="right")
    table.add_column("ops/s", justify="right")
    for name in names:
        rows = [row for row in comparison.policies if row.policy == name]
        speed = sum(row.operations for row in rows) / max(1e-9, sum(row.cpu_s for row in rows))
        table.add_row(name, *(f"{row.hit_ratio:.3f}" for row in rows), f"{speed:,.0f}")
    table.add_row("optimum", *(f"{ratio:.3f}" for ratio in comparison.optimal_hit_ratio.values()), "", style="bold")
    table.add_row(
        "infinite", *(f"{comparison.infinite_hit_ratio:.3f}" for _ in comparison.optimal_hit_ratio), "", style="dim"
    )
    return table


def _label(tokens: int) -> str:
    return f"{tokens / 1e6:g}M" if tokens >= 10**6 else f"{tokens / 1e3:g}k"
