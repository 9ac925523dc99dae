"""Is bfloat16 at least as fast as float32, whatever instructions the processor has?

kvferry's engine on one core, with the kernels of each instruction set that this machine can run (`KVFERRY_ISA`), as
processors without AVX512_BF16 or AVX-512 would run them. Both number formats take turns, each in a process of its own;
the figure is the median over turns of bfloat16's tokens per second relative to float32's in the same turn. Prints a
table, writes results/isas.<processor>.json.

    python benchmarks/isas.py                   all; half an hour
    python benchmarks/isas.py --isas avx2 --models llama
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine import FEW, Cell, name_of, run_side
from kvferry.core.settings import environment
from models import MODELS, make_named_model
from report import earlier, print_machine, save

ISAS = ("native", "avx512", "avx2", "sse")
DTYPES = ("float32", "bfloat16")
CELLS: list[Cell] = [*FEW, ("prefill", 1, 2048, 1)]


def parse() -> argparse.Namespace:
    """The flags; `repeat`, `core` and `clock` are those of `engine.run_side`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", nargs="+", choices=ISAS, default=list(ISAS))
    parser.add_argument("--models", nargs="+", choices=["llama", "mixture"], default=["llama", "mixture"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=2, help="runs of a cell in one turn")
    parser.add_argument("--core", type=int, default=sorted(os.sched_getaffinity(0))[-1])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="cpu")
    return parser.parse_args()


def measure(isa: str, model: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By cell: median tokens per second in each number format, and the median ratio."""
    os.environ[environment.ISA] = isa
    turns = []
    for _ in range(options.turns):
        sides = {dtype: run_side("kvferry", sys.executable, model, dtype, CELLS, options) for dtype in DTYPES}
        turns.append(
            {dtype: {cell: line["tokens_per_s"] for cell, line in side.items()} for dtype, side in sides.items()}
        )
    results = {}
    for cell in CELLS:
        figures = {dtype: statistics.median(turn[dtype][cell] for turn in turns) for dtype in DTYPES}
        ratio = statistics.median(turn["bfloat16"][cell] / turn["float32"][cell] for turn in turns)
        results[name_of(cell)] = {**figures, "ratio": ratio}
    return results


def main() -> None:
    """All instruction sets, one after the other; those that are not named keep their figures."""
    options = parse()
    print_machine()
    results: dict[str, Any] = earlier("isas", {})
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            model = make_named_model(Path(folder), name)
            for isa in options.isas:
                for cell, figures in measure(isa, model, options).items():
                    results.setdefault(isa, {})[f"{name}, {cell}"] = figures
                    shown = " ".join(f"{dtype} {figures[dtype]:7.0f}" for dtype in DTYPES)
                    print(f"{isa:8s} {name + ', ' + cell:36s} {shown}  {figures['ratio']:.2f}", flush=True)
    settings = {"models": {name: MODELS[name][1] for name in ("llama", "mixture")}, "threads": 1}
    settings |= {name: getattr(options, name) for name in ("turns", "repeat", "clock")}
    print(f"wrote {save('isas', settings, results)}")


if __name__ == "__main__":
    main()
