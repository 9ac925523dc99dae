"""Where does the engine's time go? The cells of engine.py, kvferry alone, with the clock on each kind of kernel.

For each cell: the share of time in linear layers (with the norms and rotations between them), in attention, in writing
KV, and in the rest (Python, torch, sampling, scheduling); what the kernels reach, beside what this core can do: the
bytes a decode step must stream through memory, and the multiplications a prefill must do. Prints a table, writes
results/profile_engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import DECODE, PREFILL, Cell, name_of
from engine_side import BLOCK_SIZE, Setup, kvferry, prompt_of
from models import SHAPE, make_bench_model
from report import print_machine, save

KINDS = {"run_steps": "linear", "linear": "linear", "paged_attention": "attention", "write_kv": "write KV"}
SHARES = ("linear", "attention", "write KV", "rest")


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--core", type=int, default=sorted(os.sched_getaffinity(0))[-1], help="the core it runs on")
    return parser.parse_args()


class Clock:
    """Seconds inside of the kernels, by kind, since `reset`."""

    def __init__(self, library: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        for name, kind in KINDS.items():
            setattr(library, name, self._timed(getattr(library, name), kind))

    def _timed(self, call: Callable[..., None], kind: str) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            call(*arguments)
            self.seconds[kind] += time.perf_counter() - began

        return timed

    def reset(self) -> None:
        """Begin anew."""
        self.seconds.clear()


def num_parameters() -> int:
    """Weights that every token goes through."""
    hidden, head_dim = SHAPE["hidden_size"], SHAPE["head_dim"]
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return int(SHAPE["num_hidden_layers"] * (attention + 3 * hidden * SHAPE["intermediate_size"]))


def kv_bytes(context: int, element: int) -> int:
    """Bytes of KV of one sequence."""
    return int(context * SHAPE["num_hidden_layers"] * 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * element)


def run_cell(generate: Any, clock: Clock, cell: Cell, element: int) -> dict[str, float]:
    """Shares of time, and what the kernels reach."""
    kind, batch, context, tokens = cell
    prompts = [prompt_of(context, 7919 * index + context) for index in range(batch)]
    times = generate(prompts, 1) if kind == "decode" else None  # fills the prefix cache: what follows is decode alone
    clock.reset()
    began = time.perf_counter()
    times = generate(prompts, tokens)
    wall = time.perf_counter() - began
    steps = len(times[0])
    seconds = {share: clock.seconds.get(share, 0.0) for share in SHARES[:-1]}
    seconds["rest"] = wall - sum(seconds.values())
    figures = {f"{share}_percent": 100 * seconds[share] / wall for share in SHARES}
    figures["step_ms"] = 1e3 * wall / steps
    lm_head = SHAPE["hidden_size"] * SHAPE["vocab_size"]
    if kind == "decode":
        figures["weights_gb_per_s"] = steps * element * (num_parameters() + lm_head) / seconds["linear"] / 1e9
        figures["kv_gb_per_s"] = steps * batch * kv_bytes(context, element) / seconds["attention"] / 1e9
    figures["linear_gflops"] = 2 * num_parameters() * batch * (steps if kind == "decode" else context) / 1e9
    figures["linear_gflops"] /= seconds["linear"]
    return figures


def limits(dtype: str) -> dict[str, float]:
    """The limits of this core: bytes read from memory by one thread, and torch's best matrix product."""
    import torch

    data = torch.ones(2**27, dtype=torch.float32)
    read = min(_seconds(data.sum) for _ in range(5))
    left = torch.randn(2048, 2048).to(getattr(torch, dtype))
    product = min(_seconds(lambda: left @ left) for _ in range(5))
    return {"read_gb_per_s": data.nbytes / read / 1e9, "torch_matmul_gflops": 2 * 2048**3 / product / 1e9}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """All cells in all number formats."""
    options = parse()
    os.sched_setaffinity(0, {options.core})
    import torch

    torch.set_num_threads(1)
    from kvferry.engine.ops.native import library

    print_machine()
    clock = Clock(library())
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_bench_model(Path(folder))
        for dtype in options.dtypes:
            cells = PREFILL + DECODE
            capacity = max(batch * (context + tokens + 2 * BLOCK_SIZE) for _, batch, context, tokens in cells)
            generate = kvferry(Setup(model, dtype, capacity))
            generate([prompt_of(64, 0)], 4)
            element = 4 if dtype == "float32" else 2
            results[dtype] = {"limits": limits(dtype)}
            print(f"\n{dtype}: {json.dumps({key: round(value, 1) for key, value in results[dtype]['limits'].items()})}")
            for cell in cells:
                results[dtype][name_of(cell)] = measured = run_cell(generate, clock, cell, element)
                figures = "  ".join(f"{key} {value:7.1f}" for key, value in measured.items())
                print(f"{name_of(cell):24s} {figures}", flush=True)
    print(f"wrote {save('profile_engine', {'model': SHAPE, 'threads': 1}, results)}")


if __name__ == "__main__":
    main()
