"""Costs in kvferry's code on a GPU that are known from reading it, each with what a run has measured of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpu.records import Figure

Figures = Mapping[str, Figure]
"""A step's figures by name; of all steps, which do not share names."""


@dataclass(frozen=True)
class Cost:
    """`code`: where it is. `measured`: a clause with its figures; None if this run has none."""

    what: str
    code: str
    measured: Callable[[Figures], str | None]


def _gathered(figures: Figures) -> str | None:
    shares = []
    for name, figure in figures.items():
        cell = name.removesuffix(": kvferry")
        gathered = figures.get(f"{cell}: SDPA on gathered KV")
        if cell != name and gathered is not None and figure.unit == "GB/s":
            shares.append((1 - figure.value / gathered.value, cell))
    if not shares:
        return None
    share, cell = max(shares)
    share = max(0.0, share)
    return f"up to {share:.0%} of the time of attention ({cell}) is neither products nor softmax"


def _copies(figures: Figures) -> str | None:
    copies = figures.get("copies to the device in a decode step")
    return None if copies is None else f"{copies.value:.0f} copies to the device in a decode step"


def _busy(figures: Figures) -> str | None:
    busy = figures.get("share of a decode step, with the profiler, in which the GPU works")
    kernels = figures.get("kernels and copies in a decode step")
    if busy is None or kernels is None:
        return None
    share, number = f"{busy.value:.0f} %", f"{kernels.value:.0f}"
    return f"the GPU works in {share} of a decode step of 8 sequences, which queues {number} operations"


def _ratio(name: str, limit: str) -> Callable[[Figures], str | None]:
    def measured(figures: Figures) -> str | None:
        figure = figures.get(name)
        return None if figure is None or figure.ratio is None else f"{figure.ratio:.2f} of {limit}"

    return measured


COSTS = (
    Cost(
        "The whole context of each sequence is gathered into new memory for each layer, keys and values apart, and"
        " rounded up to whole blocks; what is behind its end is then set to zero.",
        "engine/ops/reference.py, _gather",
        _gathered,
    ),
    Cost(
        "A mask of all keys is built for each layer anew, though layers with the same window see the same; with a mask,"
        " PyTorch's SDPA does not take its FlashAttention.",
        "engine/ops/reference.py, _visible",
        lambda figures: None,
    ),
    Cost(
        "Metadata of a step goes to the device in about ten small copies from memory that is not pinned, and the"
        " groups of sequences are computed on the host.",
        "engine/ops/batch.py, AttentionBatch.build; engine/model_runner.py, forward",
        _copies,
    ),
    Cost(
        "Every operation is queued by Python, one by one; there are no CUDA graphs.",
        "engine/model_runner.py, forward",
        _busy,
    ),
    Cost(
        "Pieces of 64 KiB are copied more slowly than one contiguous range: Python prepares the table of pieces before"
        " each launch, nothing is copied in the meantime, and the stream is polled every 0.2 ms.",
        "transport/cuda/copies.py, begin; transport/fabric/cuda_ipc.py, read",
        _ratio("kvferry cuda_ipc, pieces of 64 KiB", "a contiguous copy"),
    ),
    Cost(
        "Blocks that go to host memory get a piece of pinned memory each, one allocation a block.",
        "connectors/kv_store/blocks.py, _PinnedBlocks",
        _ratio("out, 64 KiB a layer", "a contiguous copy"),
    ),
)


def describe_costs(figures: Figures) -> list[str]:
    """One sentence for each cost, with its code and what was measured of it in this run."""
    lines = []
    for cost in COSTS:
        clause = cost.measured(figures)
        lines.append(
            f"{cost.what} (`{cost.code}`) {'Not measured in this run.' if clause is None else f'Measured: {clause}.'}"
        )
    return lines
