"""Tokens a second on one core: kvferry's engine beside transformers and vLLM, in one run.

Three models with random weights: an 88M-parameter Llama, a mixture of experts (Qwen3-MoE), and Qwen2 with half a
billion parameters and a vocabulary of 152 thousand. Prefill: one prompt until its first token. Decode: a batch of
sequences of one context length, while all of them decode. Each side is a process of its own on the same core; sides
take turns, kvferry and vLLM several. Prints medians and kvferry's ratio to each other side, writes
results/engine_<dtype>.<processor>.json; `report.py` shows those of all processors.

    python benchmarks/engine.py --vllm FOLDER/bin/python      all cells; about two hours
    python benchmarks/engine.py --quick                       a few cells, without vLLM
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import MODELS, make_named_model
from report import print_machine, save

Cell = tuple[str, int, int, int]
"""(kind, batch, context length, tokens to generate)."""

SIDE = Path(__file__).with_name("engine_side.py")
PREFILL: list[Cell] = [("prefill", 1, context, 1) for context in (512, 2048)]
DECODE: list[Cell] = [
    ("decode", batch, context, tokens + batch * context // 1600)  # more than steps until the last of them is prefilled
    for batch, tokens in ((1, 64), (8, 33), (32, 17))
    for context in (128, 512, 2048)
]
FEW: list[Cell] = [
    ("prefill", 1, 512, 1),
    ("decode", 1, 512, 64),
    ("decode", 8, 512, 36),
    ("decode", 32, 128, 20),
]
"""Of the larger models."""
CELLS = {"llama": PREFILL + DECODE, "mixture": FEW, "vocabulary": FEW}
TOO_MANY = 16_000
"""Tokens in a batch that transformers' continuous batching needs tens of minutes for on one core: left out."""
QUICK: list[Cell] = [("prefill", 1, 512, 1), ("decode", 1, 128, 33), ("decode", 8, 128, 17)]


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM; left out when not given")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2, help="how often every side takes its turn")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a cell in one turn")
    parser.add_argument("--core", type=int, default=sorted(os.sched_getaffinity(0))[-1], help="the core they run on")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that is not quiet")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="only these models")
    parser.add_argument("--sides", nargs="+", help="only these sides")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells with this in their name; saves nothing")
    parser.add_argument("--quick", action="store_true", help="a few cells, one round")
    return parser.parse_args()


def run_side(side: str, python: str, model: str, dtype: str, cells: list[Cell], options: argparse.Namespace) -> Any:
    """One turn of one side: its figures by cell."""
    command = ["taskset", "-c", str(options.core), python, str(SIDE), side, "--model", model, "--dtype", dtype]
    command += ["--cells", json.dumps(cells), "--repeat", str(options.repeat), "--clock", options.clock]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"cell"')]
    return {tuple(line["cell"]): line for line in lines}


def measure(
    name: str, model: str, dtype: str, cells: list[Cell], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Median tokens per second by cell and side."""
    sides = {"kvferry": sys.executable}
    if options.vllm is not None:
        sides["vllm"] = str(options.vllm)
    sides |= {"transformers-generate": sys.executable, "transformers-batching": sys.executable}
    chosen = {side: python for side, python in sides.items() if not options.sides or side in options.sides}
    rates: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.rounds):
        for side, python in chosen.items():
            if side.startswith("transformers") and (turn or name != "llama"):
                continue  # minutes a turn, and its distance is no matter of noise
            own = [cell for cell in cells if side != "transformers-batching" or cell[1] * cell[2] < TOO_MANY]
            for cell, line in run_side(side, python, model, dtype, own, options).items():
                rates.setdefault(f"{name}, {name_of(cell)}", {}).setdefault(side, []).extend(line["runs"])
            print(f"  {name} {dtype} {side} done", flush=True)
    return {cell: {side: statistics.median(runs) for side, runs in by_side.items()} for cell, by_side in rates.items()}


def name_of(cell: Cell) -> str:
    """A cell for people."""
    kind, batch, context, _ = cell
    return f"prefill {batch}×{context}" if kind == "prefill" else f"decode b{batch}, context {context}"


def show(dtype: str, figures: dict[str, dict[str, float]]) -> None:
    """A table: tokens per second, and kvferry's ratio to each other side."""
    others = [side for side in max(figures.values(), key=len) if side != "kvferry"]
    print(f"\n{dtype:36s} {'kvferry':>9s}" + "".join(f"{side:>24s}  ratio" for side in others))
    for cell, by_side in figures.items():
        ours = by_side["kvferry"]
        row = "".join(
            f"{by_side[side]:24.0f} {ours / by_side[side]:6.2f}" if side in by_side else f"{'-':>24s} {'-':>6s}"
            for side in others
        )
        print(f"{cell:36s} {ours:9.0f}{row}")


def main() -> None:
    """All cells of all models in all number formats."""
    options = parse()
    if options.quick:
        options.rounds, options.models = 1, ["llama"]
    print_machine()
    settings = {
        "models": {name: MODELS[name][1] for name in options.models},
        **{name: getattr(options, name) for name in ("rounds", "repeat", "clock")},
        "threads": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        models = {name: make_named_model(Path(folder), name) for name in options.models}
        for dtype in options.dtypes:
            results: dict[str, dict[str, float]] = {}
            for name, model in models.items():
                cells = [cell for cell in (QUICK if options.quick else CELLS[name]) if options.only in name_of(cell)]
                results |= measure(name, model, dtype, cells, options) if cells else {}
            show(dtype, results)
            if not options.quick and not options.only and options.models == list(MODELS):
                print(f"wrote {save(f'engine_{dtype}', settings, results)}", flush=True)


if __name__ == "__main__":
    main()
