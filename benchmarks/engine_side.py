"""One side of `engine.py`, in a process of its own: runs cells and prints a JSON line for each.

Every side answers the same question in its own words: when did each token of each sequence come? From that, the same
arithmetic gives tokens per second. Needs no kvferry for the sides that are not kvferry's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TokenTimes = list[list[float]]
"""For each sequence, when each of its tokens came (s, by `now`)."""
Generate = Callable[[list[list[int]], int], TokenTimes]
"""(prompts, tokens to generate for each) → when they came. All are asked for at once."""

now: Callable[[], float] = time.perf_counter
"""The clock: wall time, or the CPU time of this process."""
BLOCK_SIZE = 32
VOCABULARY = 4000


@dataclass(frozen=True)
class Setup:
    """A side's model and limits. `capacity`: tokens for which there is KV memory; `graphs`: vLLM's CUDA graphs."""

    model: str
    dtype: str
    capacity: int
    device: str = "cpu"
    graphs: bool = False
    max_model_len: int = 2400
    step_tokens: int = 2048

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of `capacity` tokens."""
        config = json.loads((Path(self.model) / "config.json").read_text())
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
        return int(self.capacity * per_token * (4 if self.dtype == "float32" else 2))


def main() -> None:
    """Load the side, then run its cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=sorted(SIDES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cells", required=True, help="JSON: [[kind, batch, context, tokens], …]")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, where the side has them")
    parser.add_argument("--max-model-len", type=int, default=2400)
    parser.add_argument("--wait", action="store_true", help="print that it is ready, and wait for a line of input")
    options = parser.parse_args()
    if options.clock == "cpu" and options.side != "transformers-batching":  # which has a clock of its own
        global now  # noqa: PLW0603
        now = time.process_time
    cells = json.loads(options.cells)
    setup = Setup(
        options.model, options.dtype, capacity_of(cells), options.device, options.graphs, options.max_model_len
    )
    generate = SIDES[options.side](setup)
    generate([prompt_of(64, 0)], 4)
    if options.wait:
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
    for cell in cells:
        kind, batch, context, tokens = cell
        # Where filling the caches takes a minute, once a turn must do.
        repeat = 1 if batch * context > 20_000 else options.repeat
        figures = measure(generate, kind, batch, context, tokens, repeat)
        print(json.dumps({"cell": cell, **figures}), flush=True)
    os._exit(0)  # some sides leave threads behind that never end


def capacity_of(cells: Sequence[Sequence[Any]]) -> int:
    """Tokens of KV that the largest of the cells needs."""
    return int(max(batch * (context + tokens + BLOCK_SIZE) for _, batch, context, tokens in cells))


def measure(generate: Generate, kind: str, batch: int, context: int, tokens: int, repeat: int) -> dict[str, Any]:
    """Median tokens per second and CPU seconds of a cell."""
    rates, cpu = [], []
    for run in range(repeat):
        prompts = [prompt_of(context, hash((kind, run, index))) for index in range(batch)]
        cpu_before, began = cpu_seconds(), now()
        times = generate(prompts, tokens)
        cpu.append(cpu_seconds() - cpu_before)
        rates.append(prefill_rate(times, began, context) if kind == "prefill" else decode_rate(times))
    return {"tokens_per_s": statistics.median(rates), "runs": rates, "cpu_s": statistics.median(cpu)}


def prefill_rate(times: TokenTimes, began: float, context: int) -> float:
    """Prompt tokens a second until the first token."""
    return context * len(times) / (max(seconds[0] for seconds in times) - began)


def decode_rate(times: TokenTimes) -> float:
    """Tokens a second while all sequences decode: from the last first token to the first last one."""
    begin, end = max(seconds[0] for seconds in times), min(seconds[-1] for seconds in times)
    if end <= begin:
        raise RuntimeError("they never all decode at once: too few tokens")
    counted = sum(1 for seconds in times for moment in seconds if begin < moment <= end)
    return counted / (end - begin)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """A random prompt; the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(5, VOCABULARY) for _ in range(num_tokens)]


def cpu_seconds() -> float:
    """CPU time of this process and its ended children so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


# The sides.


def kvferry(setup: Setup) -> Generate:
    """kvferry's engine, in this process."""
    from kvferry.core.request import Request
    from kvferry.core.sampling import SamplingParams
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=setup.model,
            dtype=setup.dtype,  # type: ignore[arg-type]
            device=setup.device,  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
            max_model_len=setup.max_model_len,
            max_num_batched_tokens=setup.step_tokens,
            kv_cache_memory=str(setup.kv_bytes + 2**24),
        )
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> TokenTimes:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        times: dict[str, list[float]] = {}
        for index, prompt in enumerate(prompts):
            times[str(index)] = []
            engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work:
            for output in engine.step():
                times[output.request_id] += [now()] * len(output.token_ids)
        return list(times.values())

    return generate


def vllm(setup: Setup) -> Generate:
    """vLLM's engine, in this process: eager, or with CUDA graphs of the whole model and without torch.compile."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        model=setup.model,
        dtype=setup.dtype,
        enforce_eager=not setup.graphs,
        block_size=BLOCK_SIZE,
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=setup.step_tokens,
        kv_cache_memory_bytes=setup.kv_bytes + 2**26,
        disable_log_stats=True,
        # What a GPU has to have free, whatever the KV cache takes.
        **({} if setup.device == "cpu" else {"gpu_memory_utilization": 0.3}),
        **({"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}} if setup.graphs else {}),
    )
    runs = 0

    def generate(prompts: list[list[int]], num_tokens: int) -> TokenTimes:
        nonlocal runs
        runs += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        times: dict[str, list[float]] = {}
        for index, prompt in enumerate(prompts):
            times[f"{runs}-{index}"] = []
            llm.llm_engine.add_request(f"{runs}-{index}", {"prompt_token_ids": prompt}, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                seen = times[output.request_id.rsplit("-", output.request_id.count("-") - 1)[0]]
                seen += [now()] * (len(output.outputs[0].token_ids) - len(seen))
        return list(times.values())

    return generate


def transformers_generate(setup: Setup) -> Generate:
    """`model.generate()` with its own cache and SDPA attention, all sequences as one batch."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    module = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()
    module.generation_config.eos_token_id = None

    class Clock(StoppingCriteria):  # type: ignore[misc,unused-ignore]
        """Called after each step; never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **others: Any) -> Any:
            self.times.append(now())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> TokenTimes:
        ids, clock = torch.tensor(prompts), Clock()
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return [clock.times] * len(prompts)

    return generate


def transformers_batching(setup: Setup) -> Generate:
    """`model.generate_batch()`: transformers' continuous batching over its paged cache."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    module = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> TokenTimes:
        outputs = module.generate_batch(
            prompts,
            GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=BLOCK_SIZE,
                num_blocks=setup.capacity // BLOCK_SIZE + 64,
                max_batch_tokens=setup.step_tokens,
                allow_block_sharing=False,
            ),
            record_timestamps=True,
        )
        return [output.timestamps for output in outputs.values()]

    return generate


SIDES: dict[str, Callable[[Setup], Generate]] = {
    "kvferry": kvferry,
    "vllm": vllm,
    "transformers-generate": transformers_generate,
    "transformers-batching": transformers_batching,
}

if __name__ == "__main__":
    main()
