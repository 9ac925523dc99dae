"""An engine in a process of its own for http_share.py: runs all prompts for each line of its input, and answers with
the seconds and the processor time that took.

Its arguments are the engine's name and JSON; vLLM's environment has nothing of the other scripts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]


def kvferry(settings: dict[str, Any]) -> Callable[[Prompts], None]:
    """Runs prompts in kvferry's engine."""
    from kvferry.core.request import Request
    from kvferry.core.sampling import SamplingParams
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.engine import Engine

    engine = Engine(EngineConfig(model=settings["model"], dtype="float32", kv_cache_memory="128MiB"))
    sampling = SamplingParams(max_tokens=settings["tokens"], temperature=0.0, ignore_eos=True)

    def run(prompts: Prompts) -> None:
        for prompt in prompts:
            engine.add(Request(request_id=f"{time.monotonic_ns()}", prompt_token_ids=prompt, sampling=sampling))
        left = len(prompts)
        while left:
            left -= sum(output.finish_reason is not None for output in engine.step())

    return run


def vllm(settings: dict[str, Any]) -> Callable[[Prompts], None]:
    """Runs prompts in vLLM's engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=4096,
        kv_cache_memory_bytes=128 << 20,
    )
    sampling = SamplingParams(max_tokens=settings["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    return lambda prompts: void(
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    )


def void(_: object) -> None:
    """Nothing is done with the answers."""


def main() -> None:
    """A run for each line, until the input ends."""
    settings = json.loads(sys.argv[2])
    run = {"kvferry": kvferry, "vLLM": vllm}[sys.argv[1]](settings)
    print(json.dumps({"ready": 1}), flush=True)
    for _ in sys.stdin:
        prompts = [[5 + (index * 7 + which) % 200 for which in range(16)] for index in range(settings["streams"])]
        began, worked = time.perf_counter(), time.process_time()
        run(prompts)
        print(json.dumps({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - worked}), flush=True)


if __name__ == "__main__":
    main()
