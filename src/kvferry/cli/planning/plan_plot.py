"""The plot of `kvferry plan`, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.sim.planner import SearchResult


def plot_grid(result: SearchResult, path: Path) -> None:
    """The share of requests within multiples of the targets, a panel for the plain and for the split deployment.
    Raises `ConfigError`."""
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
