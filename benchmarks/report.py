"""The machine and the settings that every benchmark here reports, and the folder of results.

Results of each kind of processor are kept beside each other, as `results/<name>.<processor>.json`. As a program it
prints what is kept of a benchmark of engines, all processors side by side, as Markdown:

    python benchmarks/report.py                         engine_float32 and engine_bfloat16
    python benchmarks/report.py engine_bfloat16
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
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
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("kvferry", "torch", "transformers", "vllm")},
    }


def processor() -> str:
    """The kind of processor, for file names: maker, line, and the widest instructions that the kernels use."""
    words = re.sub(r"\(\w+\)|processor|cpu.*$|@.*$", " ", _cpu_model(), flags=re.IGNORECASE).split()
    flags = _cpu_line("flags").split()
    widest = (("amx_bf16", "amx"), ("avx512_bf16", "avx512-bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))
    ability = next((name for flag, name in widest if flag in flags), platform.machine())
    return "-".join([*words[:2], ability]).lower()


def save(name: str, settings: dict[str, Any], results: Any, *, in_lines: bool = False) -> Path:
    """Write `results/<name>.<processor>.json`; the newest run replaces the one before, whose figures git keeps.
    `in_lines`: the results are a table of which each is long; one is one line."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.{processor()}.json"
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": settings,
        "results": {} if in_lines else results,
    }
    text = json.dumps(record, indent=1)
    if in_lines:
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(result)}" for key, result in results.items())
        text = text.removesuffix("{}\n}") + "{\n" + lines + "\n }\n}"
    path.write_text(text + "\n")
    return path


def earlier(name: str, empty: Any) -> Any:
    """The results that `save` has stored for this processor, for parts that are measured one at a time; `empty` without
    any."""
    path = RESULTS / f"{name}.{processor()}.json"
    return json.loads(path.read_text())["results"] if path.exists() else empty


def side_by_side(name: str) -> str:
    """Markdown of one benchmark of engines: kvferry's tokens per second and ratio to each other side."""
    records = {path.name.split(".")[1]: json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}.*.json"))}
    sides = {kind: _sides(record["results"]) for kind, record in records.items()}
    head = [f"{kind}: {', '.join(['kvferry', *others])}" for kind, others in sides.items()]
    cells = list(dict.fromkeys(cell for record in records.values() for cell in record["results"]))
    rows = [f"| {name} | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|"]
    for cell in cells:
        shown = [_shown(record["results"].get(cell, {}), sides[kind]) for kind, record in records.items()]
        rows.append(f"| {cell} | " + " | ".join(shown) + " |")
    dates = ", ".join(f"{kind} of {record['date']}" for kind, record in records.items())
    return "\n".join([*rows, "", f"Tokens per second, and the ratio to each other side. {dates}."])


def _sides(results: dict[str, dict[str, float]]) -> list[str]:
    return [side for side in dict.fromkeys(side for cell in results.values() for side in cell) if side != "kvferry"]


def _shown(figures: dict[str, float], others: list[str]) -> str:
    if "kvferry" not in figures:
        return ""
    ratios = [f"{figures['kvferry'] / figures[side]:.2f}" if side in figures else "-" for side in others]
    return ", ".join([f"{figures['kvferry']:.0f}", *ratios])


def print_machine() -> None:
    """The machine on one line."""
    print(", ".join(f"{key} {value}" for key, value in machine().items() if value))


def _gpu() -> str:
    """Name and driver of the GPUs; nothing where there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return "; ".join(
            subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_model() -> str:
    return _cpu_line("model name") or platform.processor()


def _cpu_line(name: str) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    for name in sys.argv[1:] or ["engine_float32", "engine_bfloat16"]:
        print(side_by_side(name), end="\n\n")
