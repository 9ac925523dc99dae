"""Step *hand-off*: pieces from one process's device memory into another's, beside a contiguous copy and TCP."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from typing import Any

import transfer
from gpu.context import Context
from gpu.double import driver
from gpu.records import Recorder

GOALS = {("kvferry cuda_ipc", 64): 0.9}
"""The ratio to a contiguous copy to reach, by medium and KiB of a piece."""


def memories(context: Context) -> tuple[str, str]:
    """Memory of the serving and of the reading process, as `transfer` names it."""
    return ("host", "host") if context.small else ("cuda:0", f"cuda:{context.gpu_of_decode}")


def run(context: Context) -> None:
    """Each medium in two processes of its own; contents are verified before anything is timed."""
    total, blocks = (8, [16, 64]) if context.small else (256, [16, 64, 1024])
    less = min(total, 64)  # for what may be slow
    one_copy = _rates(context, "one copy", total, blocks, memories(context))
    if not one_copy:
        return
    limit = statistics.median(one_copy.values())
    name = "one contiguous copy" + (" over the link" if context.gpu_of_decode else "")
    context.record.duration(f"{name}, {total} MiB", limit, "GB/s")
    for medium, where in _media(context).items():
        is_slow = medium not in ("kvferry cuda_ipc", "a gather kernel")
        for size, rate in _rates(context, medium, less if is_slow else total, blocks, where).items():
            goal = None if context.small else GOALS.get((medium, size))
            context.record.rate(f"{medium}, pieces of {size} KiB", rate, "GB/s", (name, limit), goal)


def _media(context: Context) -> dict[str, tuple[str, str]]:
    """The memories by medium."""
    device = memories(context)
    media = {"kvferry cuda_ipc": ("double", "double") if context.small else device}
    if not context.small:
        media["a gather kernel"] = (device[1], device[1])
    if importlib.util.find_spec("nixl") is not None:
        media |= {"kvferry nixl": device, "NIXL's API": device}
    if context.gpu_of_decode:
        media["kvferry nccl"] = device
    return {**media, "kvferry tcp": ("host", "host")}


def _rates(context: Context, medium: str, total: int, blocks: list[int], where: tuple[str, str]) -> dict[int, float]:
    """GB/s by KiB of a piece. A medium that does not run is a sentence of the report."""
    environment: dict[str, str] = {}
    if "double" in where:
        folder = context.scratch("double")
        environment = driver.environment(driver.build(folder), folder / "calls")
    options: Any = argparse.Namespace(
        blocks=blocks,
        repeat=2 if context.small else 5,
        cores=None,
        memories=where,
        environment=environment,
        timeout_s=100.0 if context.small else 15.0,
    )
    done = transfer.run(medium, total, options)
    if len(done.lines) < len(blocks):
        _missing(context.record, medium, done.reason)
    num_bytes = total * transfer.MIB
    return {line["block"] // 1024: num_bytes / statistics.median(line["seconds"]) / 1e9 for line in done.lines}


def _missing(record: Recorder, medium: str, reason: str) -> None:
    """kvferry's own ways must run; those of others may be missing."""
    if medium in ("kvferry cuda_ipc", "kvferry tcp", "one copy"):
        record.check(f"{medium} moves KV", False, reason)
    else:
        record.note(f"{medium} does not run: {reason}")
