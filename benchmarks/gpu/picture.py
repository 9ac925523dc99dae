"""Step *picture*: streams of tokens while a prompt of 4,096 tokens arrives each second.

All sides are started at once, as starting takes longer than measuring, and have the traffic one after the other. They
share the GPUs: with one, P and D run under MPS where it runs; with two, on a GPU each. A side that is not up in time,
or that fails, is a sentence of the report.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from gpu.card import visible_devices
from gpu.context import Context
from gpu.models import llama
from gpu.mps import mps, shares
from gpu.records import NotPossible
from load import Mix, MixResult, run_mix
from served import running

UP_S = 60.0
"""Seconds until a side that is not up is left out."""
MEASURED_S = (2.5, 5.0)
"""Seconds for which one side has its traffic, at least and at most."""
REST_S = 1.0
"""Seconds from the end of that traffic to the last answer."""
MPS_S = 15.0
"""Seconds that a client of MPS may take."""
ENDING_S = 5.0
"""Seconds that all servers together may take to end."""
SHARE = 60
"""Per cent of the multiprocessors that P and D may each use under MPS; they overlap."""
NAME = "bench"
NEVER_AGGREGATED = ("--disaggregate-from", "0")


@dataclass(frozen=True)
class Side:
    """One deployment. `transfer`: hand-offs between P and D; None: two plain instances."""

    name: str
    engine: str
    transfer: Mapping[str, Any] | None


OWN_P2P = {"kv_connector": "P2pConnector"}
PLAIN_VLLM = "2 plain vLLM"
SIDES = (
    Side("kvferry 1P+1D", "kvferry", OWN_P2P),
    Side("2 plain kvferry", "kvferry", None),
    Side(PLAIN_VLLM, "vllm", None),
    Side("vLLM 1P+1D, KvferryP2pConnector", "vllm", OWN_P2P),
    Side("vLLM 1P+1D, NixlConnector", "vllm", {"kv_connector": "NixlConnector"}),
)
OWN = {side.name for side in SIDES if side.engine == "kvferry" or side.transfer is OWN_P2P}
"""The sides that have to answer."""


def mixes(small: bool) -> dict[int, Mix]:
    """The traffic by number of streams."""
    mix = Mix(
        num_streams=4,
        stream_prompt_tokens=64,
        stream_tokens=256,
        long_prompt_tokens=4096,
        long_tokens=8,
        long_per_s=1.0,
        duration_s=MEASURED_S[1],
        vocab_size=32000,
        is_evenly_spaced=True,
        is_cut=True,
    )
    if small:
        return {
            2: replace(
                mix,
                num_streams=2,
                stream_tokens=40,
                long_prompt_tokens=60,
                long_per_s=4.0,
                duration_s=1.0,
                vocab_size=500,
            )
        }
    return {streams: replace(mix, num_streams=streams) for streams in (4, 32)}


def seconds_each(left_s: float, num_measurements: int) -> float:
    """Seconds of traffic for each measurement, so that all of them are done in time."""
    shortest_s, longest_s = MEASURED_S
    return min(longest_s, max(shortest_s, (left_s - ENDING_S) / max(1, num_measurements) - REST_S))


def up_s(left_s: float, num_measurements: int, longest_s: float = UP_S) -> float:
    """Seconds for the start of the sides, after which the shortest measurements still have time."""
    return min(longest_s, max(0.0, left_s - num_measurements * (MEASURED_S[0] + REST_S) - ENDING_S))


def run(context: Context) -> None:
    """Start all sides, measure those that are up, and draw."""
    model = llama(context)
    python = _vllm_python(context)
    part = os.environ.get("KVFERRY_GPU_SIDES", "")
    sides = [side for side in SIDES if part in side.name and (side.engine == "kvferry" or python is not None)]
    if not sides:
        raise NotPossible(f"no side that can run has {part!r} in its name")
    results: dict[int, dict[str, MixResult]] = {}
    with ExitStack() as stack:
        environment = _sharing(context, stack)
        pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
        servers = stack.enter_context(ExitStack())  # left once their processes have ended
        stack.enter_context(ended_together(ENDING_S))
        planned = mixes(context.small)
        start = time.monotonic()
        end = start + up_s(context.left_s, len(sides) * len(planned), 400.0 if context.small else UP_S)
        starting = {
            side.name: pool.submit(_enter, servers, context, _started(context, side, model, python, environment))
            for side in sides
        }
        urls: dict[str, str] = {}
        for side in sides:
            must_run = side.engine == "kvferry" or (side.transfer is OWN_P2P and PLAIN_VLLM in urls)
            if url := _url(context, side.name, starting[side.name], end, must_run):
                urls[side.name] = url
        context.record.note(f"{len(urls)} of {len(sides)} sides were up after {time.monotonic() - start:.0f} s")
        for index, (streams, mix) in enumerate(planned.items()):
            results[streams] = {}
            num_left = (len(planned) - index) * len(urls)
            duration_s = min(mix.duration_s, seconds_each(context.left_s, num_left))
            for name, url in urls.items():
                measured = _measured(context, name, url, replace(mix, duration_s=duration_s), name in OWN)
                if measured is not None:
                    results[streams][name] = measured
            _draw(context, results)


@contextmanager
def ended_together(grace_s: float) -> Iterator[None]:
    """At its end, all processes that were started in the block are interrupted at once, and killed after `grace_s`."""
    this = psutil.Process()
    before = set(this.children())
    try:
        yield
    finally:
        began = [process for process in this.children() if process not in before]
        below = [child for process in began for child in process.children(recursive=True)]
        for process in began:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(began, timeout=grace_s)
        for process in (*alive, *below):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _vllm_python(context: Context) -> Path | None:
    try:
        return context.vllm_python()
    except NotPossible as reason:
        context.record.note(str(reason))
        return None


def _sharing(context: Context, stack: ExitStack) -> Mapping[str, str]:
    """The environment of instances that share a GPU."""
    if context.small or context.num_gpus > 1:
        return {}
    try:
        environment = stack.enter_context(mps(context.scratch("mps"), check_s=MPS_S))
    except NotPossible as reason:
        context.record.note(f"{reason}; P and D take turns on the GPU")
        return {}
    context.record.note(f"P and D share the GPU under MPS, up to {SHARE} % of its multiprocessors each")
    return environment


def _enter(stack: ExitStack, context: Context, side: AbstractContextManager[str]) -> str:
    """Start a side, and send it some traffic, with which it does what is done once only."""
    url = stack.enter_context(side)
    *_, heaviest = mixes(context.small).values()
    asyncio.run(run_mix(url, NAME, replace(heaviest, duration_s=heaviest.duration_s / 5, seed=1)))
    return url


def _url(context: Context, name: str, starting: Future[str], end: float, must_run: bool) -> str | None:
    """The URL of a side that is up in time. `end`: as `time.monotonic` gives it."""
    try:
        return starting.result(max(0.0, end - time.monotonic()))
    except NotInTime:
        context.record.note(f"{name} was not up in time, and is left out")
    except Exception as error:  # noqa: BLE001 - a side that does not start must not end the others
        _missing(context, name, error, must_run)
    return None


def _missing(context: Context, name: str, error: Exception, must_run: bool) -> None:
    """kvferry's own sides must run, and its connector where vLLM does; those of others may not."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    text = (str(error).strip().splitlines() or [repr(error)])[-1]
    if must_run:
        context.record.check(f"{name} serves", False, text)
    else:
        context.record.note(f"{name} does not run: {text}")


@contextmanager
def _started(
    context: Context, side: Side, model: str, python: Path | None, sharing: Mapping[str, str]
) -> Iterator[str]:
    """Two instances and a router; yields its URL."""
    roles = ("prefill", "decode") if side.transfer is not None else ("serve", "serve")

    def log_of(server: str) -> Path:
        return context.scratch("picture") / f"{re.sub(r'[^a-z0-9]+', '-', side.name.lower())}{server}.log"

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def instance(index: int) -> str:
            arguments = [roles[index], model, "--served-model-name", NAME, "--port", "0"]
            if side.transfer is not None:
                arguments += ["--kv-transfer-config", json.dumps(side.transfer)]
            arguments += _vllm_flags(context, python) if side.engine == "vllm" else _own_flags(context)
            environment = {**_device(context, index, sharing)}
            return stack.enter_context(running(*arguments, more=environment, log=log_of(f"-{index}"))).url

        first, second = pool.map(instance, (0, 1))
        instances = ["--decode-url", first, "--decode-url", second]
        if side.transfer is not None:
            instances = [*NEVER_AGGREGATED, "--prefill-url", first, "--decode-url", second]
        yield stack.enter_context(running("router", *instances, "--port", "0", log=log_of("-router"))).url


def _device(context: Context, index: int, sharing: Mapping[str, str]) -> dict[str, str]:
    """The environment with which an instance finds its GPU, or its share of one."""
    if context.small:
        return {}
    if context.num_gpus > 1:
        return {"CUDA_VISIBLE_DEVICES": (visible_devices() or ["0", "1"])[index]}
    return {**sharing, **(shares(SHARE, SHARE)[index] if sharing else {})}


def _own_flags(context: Context) -> list[str]:
    if context.small:
        return ["--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "32MiB"]
    return [
        "--dtype",
        "bfloat16",
        "--device",
        "cuda",
        "--kv-cache-memory",
        "1536MiB",
        "--max-num-batched-tokens",
        "4096",
    ]


def _vllm_flags(context: Context, python: Path | None) -> list[str]:
    graphs = json.dumps({"mode": 0, "cudagraph_mode": "FULL"})
    ours = ["--engine", "vllm", "--engine-python", str(python), "--"]
    theirs = ["--no-enable-prefix-caching", "--max-num-batched-tokens", "4096", "--compilation-config", graphs]
    if context.small:
        sizes = ["--dtype", "float32", "--kv-cache-memory-bytes", str(2**25), "--max-model-len", "512"]
    else:
        sizes = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1536 * 2**20), "--max-model-len", "8192"]
        sizes += ["--gpu-memory-utilization", "0.08"]
    return [*ours, *sizes, *theirs]


def _measured(context: Context, name: str, url: str, mix: Mix, must_run: bool) -> MixResult | None:
    """The traffic on one side; its figures are recorded."""
    try:
        result = asyncio.run(run_mix(url, NAME, mix))
        summary = result.summary()
    except Exception as error:  # noqa: BLE001 - a side that fails must not end the others
        _missing(context, name, error, must_run)
        return None
    label = f"{mix.num_streams} streams, {name}"
    for key, title in (("itl_p50_ms", "ITL P50"), ("itl_p99_ms", "ITL P99"), ("itl_max_ms", "longest gap")):
        context.record.duration(f"{label}: {title}", summary[key], "ms")
    if summary["num_longs"]:
        context.record.duration(f"{label}: TTFT P50 of long prompts", summary["long_ttft_p50_ms"], "ms")
        context.record.duration(f"{label}: longest TTFT of long prompts", summary["long_ttft_p99_ms"], "ms")
    return result


def _draw(context: Context, results: dict[int, dict[str, MixResult]]) -> None:
    """`picture.svg`: for each number of streams, the share of gaps longer than x, both axes logarithmic."""
    try:
        import matplotlib as mpl
    except ImportError:
        context.record.note("matplotlib is not installed: there are figures, and no picture")
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {streams: sides for streams, sides in results.items() if sides}
    if not drawn:
        return
    figure, panels = plt.subplots(1, len(drawn), figsize=(5.5 * len(drawn), 4.6), squeeze=False, sharey=True)
    colours = {side.name: "black" if index == 0 else f"C{index}" for index, side in enumerate(SIDES)}
    for axes, (streams, sides) in zip(panels[0], drawn.items(), strict=True):
        for name, result in sides.items():
            gaps = sorted(gap * 1e3 for stream in result.streams for gap in stream.gaps)
            left = [1 - index / len(gaps) for index in range(len(gaps))]
            axes.loglog(gaps, left, label=name, color=colours[name], linewidth=2.2 if name == SIDES[0].name else 1.2)
        axes.set(xlabel="time between two tokens, ms", title=f"{streams} streams", ylim=(1e-4, 1))
        axes.grid(True, which="both", alpha=0.25)
    panels[0][0].set_ylabel("share of gaps that are longer")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(context.folder / "picture.svg")
    plt.close(figure)
