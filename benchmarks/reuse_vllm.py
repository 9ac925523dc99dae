"""One side of reuse.py inside vLLM, in a process of its own: seconds to the first token after a document that was kept.

Runs in vLLM's environment and imports nothing of the others. Its argument and its last line are JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any


def main() -> None:
    """Keep the document, then ask."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = asked["transfer"]
    llm = LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        enforce_eager=True,
        block_size=asked["block_size"],
        kv_cache_memory_bytes=512 << 20,
        max_model_len=asked["tokens"] + 64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False if transfer is None else None,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    draws = random.Random(1)

    def some(number: int) -> list[int]:
        return [draws.randrange(asked["vocab"]) for _ in range(number)]

    def first_token(prompt: list[int]) -> float:
        began = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, one_token, use_tqdm=False)
        return time.perf_counter() - began

    document = some(asked["tokens"])
    first_token([*document, 1])
    if transfer is not None:
        time.sleep(3)  # what is kept is on its way
        llm.reset_prefix_cache()
    samples = []
    for _ in range(asked["repeat"]):
        samples.append(first_token([*document, *some(asked["question"])]))
        if transfer is not None:
            llm.reset_prefix_cache()
    print(json.dumps({"ttft_s": statistics.median(samples)}))


if __name__ == "__main__":
    main()
