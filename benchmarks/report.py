"""What every benchmark here says beside its figures: the machine, the settings; and where results go."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, memory and the versions that matter."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("kvferry", "torch", "transformers", "vllm")},
    }


def save(name: str, settings: dict[str, Any], results: Any) -> Path:
    """Write `results/<name>.json`; the newest run replaces the one before, whose figures git keeps."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def print_machine() -> None:
    """The machine on one line."""
    print(", ".join(f"{key} {value}" for key, value in machine().items() if value))


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
