"""The surroundings of a step: device, sizes, folders, and the Python that has vLLM."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.records import NotPossible, Recorder

ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".venv-triton"
"""Where `make install-triton` puts Triton, for machines whose PyTorch comes without it."""


@dataclass(frozen=True)
class Context:
    """`device`: "cuda" or "cpu"; on a CPU everything is small, and only shows that the code runs."""

    device: str
    folder: Path
    """`build/gpu`; nothing is written elsewhere."""
    num_gpus: int
    record: Recorder
    end: float
    """When the step is ended, as `time.monotonic` gives it."""

    @property
    def small(self) -> bool:
        """True if sizes are small, for a run without a GPU."""
        return self.device == "cpu"

    @property
    def gpu_of_decode(self) -> int:
        """Index of the GPU of D; P has the first one."""
        return 1 if self.num_gpus > 1 else 0

    @property
    def left_s(self) -> float:
        """Seconds until the step is ended."""
        return self.end - time.monotonic()

    def scratch(self, name: str) -> Path:
        """A folder of the step's own, made if needed."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def vllm_python(self) -> Path:
        """The interpreter that has vLLM: KVFERRY_VLLM_PYTHON, this one, or that of .venv-vllm. Raises `NotPossible`."""
        named = os.environ.get("KVFERRY_VLLM_PYTHON")
        if named:
            return Path(named)
        if importlib.util.find_spec("vllm") is not None:
            return Path(sys.executable)
        beside = ROOT / ".venv-vllm/bin/python"
        if beside.exists() and not self.small:
            return beside
        raise NotPossible("vLLM is not installed for this Python; KVFERRY_VLLM_PYTHON names another one that has it")


def import_triton() -> Any:
    """Triton, also from `.venv-triton`. Raises `NotPossible`."""
    if importlib.util.find_spec("triton") is None:
        if not TRITON.exists():
            raise NotPossible("Triton is not installed; `make install-triton` does that")
        sys.path.append(str(TRITON))
        importlib.invalidate_caches()
    import triton

    return triton


def seconds_of(
    call: Callable[[], object], device: str, *, budget_s: float = 1.0, at_least: int = 3, at_most: int = 100
) -> float:
    """Median seconds of a call, after one that warms up. Each ends when the device is idle. Repeats for `budget_s`,
    but at least and at most so many times."""
    import torch

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    call()
    synchronize()
    durations: list[float] = []
    end = time.perf_counter() + budget_s
    while len(durations) < at_least or (time.perf_counter() < end and len(durations) < at_most):
        start = time.perf_counter()
        call()
        synchronize()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
