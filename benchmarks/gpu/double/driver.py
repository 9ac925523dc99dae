"""Builds the stand-in for the driver, and makes a process load it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile `libcuda.so.1` into `folder`; returns the folder. Needs a C compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(FOLDER / "libcuda.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    return folder


def environment(folder: Path, calls: Path | None = None) -> dict[str, str]:
    """The variables with which a process loads the stand-in in `folder`. `calls`: where it records its calls."""
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), **({"KVFERRY_CUDA_CALLS": str(calls)} if calls else {})}
