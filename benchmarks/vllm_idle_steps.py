"""One side of vllm_idle.py inside vLLM, all of it in this process: CPU milliseconds for each token of an answer.

Runs in vLLM's environment and imports nothing of the others. Its argument is JSON; for each line that it reads it gives
one answer and writes a line with its figure.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Answer until there are no more lines."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = settings["transfer"]
    llm = LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    sampling = SamplingParams(max_tokens=settings["tokens"], temperature=0.0, ignore_eos=True)
    prompt = {"prompt_token_ids": settings["prompt"]}
    llm.generate(prompt, sampling, use_tqdm=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        before = time.process_time()
        llm.generate(prompt, sampling, use_tqdm=False)
        print(json.dumps((time.process_time() - before) / settings["tokens"] * 1e3), flush=True)


if __name__ == "__main__":
    main()
