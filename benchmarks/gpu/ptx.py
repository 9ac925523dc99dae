"""Assembles the copy kernel with NVIDIA's assembler, for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

from gpu.context import TRITON
from gpu.records import NotPossible

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100")
"""Turing, Ampere, Ada, Hopper and Blackwell."""


def find_ptxas() -> Path:
    """`ptxas` of the CUDA toolkit, of the wheel nvidia-cuda-nvcc, or of Triton's. Raises `NotPossible`."""
    on_path = shutil.which("ptxas")
    candidates = [Path(on_path)] if on_path else []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(folder).glob("*/bin/ptxas"))
    triton = importlib.util.find_spec("triton")
    packages = [Path(folder) for folder in (triton.submodule_search_locations or [])] if triton else []
    candidates += [package / "backends/nvidia/bin/ptxas" for package in (*packages, TRITON / "triton")]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise NotPossible("no ptxas: the CUDA toolkit, nvidia-cuda-nvcc-cu12 and Triton have one")


def assemble(ptxas: Path, architecture: str, code: Path | None = None) -> str:
    """Assemble the copy kernel, or `code`. Returns what is wrong; empty if nothing is."""
    path = code or Path(str(files("kvferry.transport.cuda").joinpath("copy.ptx")))
    command = [str(ptxas), f"-arch={architecture}", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
