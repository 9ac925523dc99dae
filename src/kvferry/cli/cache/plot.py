"""The plot of `kvferry cache simulate`, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import require_writable
from kvferry.store.trace.comparison import Comparison

ENDINGS = (".svg", ".png")


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if this plot cannot be written, before any work is done."""
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(ENDINGS)}")
    require_writable("--plot", path)
    require_library("--plot", "matplotlib", "plot", ["matplotlib"])


def plot(comparison: Comparison, path: Path) -> None:
    """Plot the hit ratio over the capacity: a line for each policy, one for the optimum, and one for an unbounded
    cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [tokens / 1e6 for tokens in comparison.optimal_hit_ratio]
    for name in dict.fromkeys(row.policy for row in comparison.policies):
        axes.plot(sizes, [row.hit_ratio for row in comparison.policies if row.policy == name], marker="o", label=name)
    axes.plot(
        sizes, list(comparison.optimal_hit_ratio.values()), color="black", linestyle="--", marker=".", label="optimum"
    )
    axes.axhline(comparison.infinite_hit_ratio, color="grey", linestyle=":", label="infinite")
    axes.set(xscale="log", xlabel="capacity, million tokens", ylabel="share of blocks found", ylim=(0, None))
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error
