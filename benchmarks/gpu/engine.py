"""Step *engine*: tokens per second of kvferry's engine beside vLLM's, eager and with CUDA graphs; and what a decode
step of kvferry's consists of."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import engine_side
from engine_side import Generate, Setup, measure, prompt_of
from gpu.context import ROOT, Context
from gpu.models import llama
from gpu.records import NotPossible

GOAL = 0.8
SIDE = ROOT / "benchmarks" / "engine_side.py"
PROFILED_STEPS = 8
Cell = tuple[str, int, int, int]
"""(kind, batch, context length, tokens to generate)."""


def cells(small: bool) -> list[Cell]:
    """Prefill, and decode of 1, 8 and 64 sequences. Enough tokens that all of them decode at once."""
    if small:
        return [("prefill", 1, 48, 1), ("decode", 2, 16, 5)]
    return [("prefill", 1, 4096, 1), *(("decode", batch, 512, 64 + batch // 2) for batch in (1, 8, 64))]


def run(context: Context) -> None:
    """kvferry first; then both vLLMs, which load at the same time and are measured one after the other."""
    model = llama(context)
    chosen = cells(context.small)
    dtype = "float32" if context.small else "bfloat16"
    setup = Setup(model, dtype, engine_side.capacity_of(chosen), context.device, False, 8192)
    ours = _ours(context, setup, chosen)
    try:
        python = context.vllm_python()
    except NotPossible as reason:
        context.record.note(str(reason))
        return
    with ExitStack() as stack:
        sides = [stack.enter_context(VLLM(context, python, setup, chosen, graphs)) for graphs in (True, False)]
        for side in sides:
            side.wait_until_ready()
        for side in sides:
            goal = GOAL if side.graphs and not context.small else None
            for cell, rate in side.measure().items():
                baseline = (f"{side.name}, no torch.compile", rate)
                context.record.rate(f"{name_of(cell)}, beside {side.name}", ours[cell], "tokens/s", baseline, goal)
            if error := side.error():
                context.record.note(f"{side.name}, does not run: {error}")


def name_of(cell: Cell) -> str:
    """A cell for people."""
    kind, batch, context, _ = cell
    return f"prefill b{batch}, {context} tokens" if kind == "prefill" else f"decode b{batch}, context {context}"


def _ours(context: Context, setup: Setup, chosen: list[Cell]) -> dict[Cell, float]:
    """Tokens per second by cell."""
    start = time.perf_counter()
    generate = engine_side.kvferry(setup)
    context.record.duration("kvferry loads the model", time.perf_counter() - start, "s")
    generate([prompt_of(64, 0)], 4)
    rates = {}
    for cell in chosen:
        kind, batch, length, tokens = cell
        figures = measure(generate, kind, batch, length, tokens, 1 if context.small or batch == 64 else 3)
        rates[cell] = figures["tokens_per_s"]
        context.record.duration(f"{name_of(cell)}: kvferry", rates[cell], "tokens/s")
    _profile(context, generate)
    return rates


def _profile(context: Context, generate: Generate) -> None:
    """Copies to the device, kernels, and the share of the time in which the GPU is at work, for each decode step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] if context.small else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        start = time.perf_counter()
        generate([prompt_of(32, index) for index in range(8)], PROFILED_STEPS)
        elapsed = time.perf_counter() - start
    events: list[Any] = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    if not events:
        context.record.note("the profiler sees no work of a GPU: steps are not broken down")
        return
    copies = sum("Memcpy HtoD" in event.name for event in events)
    busy = sum(event.device_time_total for event in events) / 1e6
    context.record.duration("copies to the device in a decode step", copies / PROFILED_STEPS, "")
    context.record.duration("kernels and copies in a decode step", len(events) / PROFILED_STEPS, "")
    context.record.duration(
        "share of a decode step, with the profiler, in which the GPU works", busy / elapsed * 100, "%"
    )


class VLLM:
    """vLLM's engine in a process of its own, in eager mode or with CUDA graphs. Use it as a context."""

    def __init__(self, context: Context, python: Path, setup: Setup, chosen: list[Cell], graphs: bool) -> None:
        self.graphs, self.name = graphs, f"vLLM, {'CUDA graphs' if graphs else 'eager'}"
        command = [str(python), str(SIDE), "vllm", f"--model={setup.model}", f"--dtype={setup.dtype}"]
        command += [f"--cells={json.dumps(chosen)}", f"--device={context.device}", "--max-model-len=8192"]
        self._command = [*command, "--repeat=1", "--wait", *(["--graphs"] if graphs else [])]
        self._log = context.folder / f"vllm-{'graphs' if graphs else 'eager'}.log"

    def __enter__(self) -> VLLM:
        pipe = subprocess.PIPE
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_until_ready(self) -> None:
        """Until the model is loaded, or the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"ready"'):
                break

    def measure(self) -> dict[Cell, float]:
        """Tokens per second by cell; fewer cells if it fails. Waits for the end of the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        lines = [json.loads(line) for line in self._process.stdout if line.startswith('{"cell"')]
        return {tuple(line["cell"]): line["tokens_per_s"] for line in lines}

    def error(self) -> str:
        """The reason why the process failed; empty if it did not."""
        if self._process.wait() == 0:
            return ""
        errors = [line for line in self._log.read_text(errors="replace").splitlines() if "Error" in line]
        return errors[-1].strip()[-200:] if errors else f"exit status {self._process.returncode}"
