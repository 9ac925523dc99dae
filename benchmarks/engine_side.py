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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TokenTimes = list[list[float]]
"""For each sequence, when each of its tokens came (s, by `now`)."""
Generate = Callable[[list[list[int]], int], TokenTimes]
"""(prompts, tokens to generate for each) → when they came. All are asked for at once."""

now: Callable[[], float] = time.perf_counter
"""The clock: wall time, or the CPU time of this process."""
MAX_MODEL_LEN = 2400
BLOCK_SIZE = 32
STEP_TOKENS = 2048
VOCABULARY = 4000


def main() -> None:
    """Load the side, then run its cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=sorted(SIDES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cells", required=True, help="JSON: [[kind, batch, context, tokens], …]")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    if options.clock == "cpu" and options.side != "transformers-batching":  # which has a clock of its own
        global now  # noqa: PLW0603
        now = time.process_time
    cells = json.loads(options.cells)
    capacity = max(batch * (context + tokens + BLOCK_SIZE) for _, batch, context, tokens in cells)
    generate = SIDES[options.side](options.model, options.dtype, capacity)
    generate([prompt_of(64, 0)], 4)
    for cell in cells:
        kind, batch, context, tokens = cell
        # Where filling the caches takes a minute, once a turn must do.
        repeat = 1 if batch * context > 20_000 else options.repeat
        figures = measure(generate, kind, batch, context, tokens, repeat)
        print(json.dumps({"cell": cell, **figures}), flush=True)
    os._exit(0)  # some sides leave threads behind that never end


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
    return context * len(times) / (max(one[0] for one in times) - began)


def decode_rate(times: TokenTimes) -> float:
    """Tokens a second while all sequences decode: from the last first token to the first last one."""
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    if end <= begin:
        raise RuntimeError("they never all decode at once: too few tokens")
    counted = sum(1 for one in times for moment in one if begin < moment <= end)
    return counted / (end - begin)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """A random prompt; the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(5, VOCABULARY) for _ in range(num_tokens)]


def kv_bytes(model: str, dtype: str, tokens: int) -> int:
    """Bytes of KV of so many tokens."""
    config = json.loads((Path(model) / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    return int(tokens * per_token * (4 if dtype == "float32" else 2))


def cpu_seconds() -> float:
    """CPU time of this process and its ended children so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


# The sides.


def kvferry(model: str, dtype: str, capacity: int) -> Generate:
    """kvferry's engine, in this process."""
    from kvferry.core.request import Request
    from kvferry.core.sampling import SamplingParams
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory=str(kv_bytes(model, dtype, capacity) + 2**24),
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


def vllm(model: str, dtype: str, capacity: int) -> Generate:
    """vLLM's engine, in this process, eager."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        kv_cache_memory_bytes=kv_bytes(model, dtype, capacity) + 2**26,
        disable_log_stats=True,
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


def transformers_generate(model: str, dtype: str, capacity: int) -> Generate:
    """`model.generate()` with its own cache and SDPA attention, all sequences as one batch."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    module = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
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


def transformers_batching(model: str, dtype: str, capacity: int) -> Generate:
    """`model.generate_batch()`: transformers' continuous batching over its paged cache."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    module = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> TokenTimes:
        outputs = module.generate_batch(
            prompts,
            GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=BLOCK_SIZE,
                num_blocks=capacity // BLOCK_SIZE + 64,
                max_batch_tokens=STEP_TOKENS,
                allow_block_sharing=False,
            ),
            record_timestamps=True,
        )
        return [output.timestamps for output in outputs.values()]

    return generate


SIDES: dict[str, Callable[[str, str, int], Generate]] = {
    "kvferry": kvferry,
    "vllm": vllm,
    "transformers-generate": transformers_generate,
    "transformers-batching": transformers_batching,
}

if __name__ == "__main__":
    main()
