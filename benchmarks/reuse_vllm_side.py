"""One side of reuse_vllm.py: a vLLM in a process of its own, which answers what it is asked on its standard input.

Runs in vLLM's environment and imports nothing of the others. vLLM's engine is a process below this one, as in its
server: within this one, its loop would never sleep while it waits for KV. The argument is JSON; each line of the input
is a prompt, and each answer has the seconds to the first token, the processor time of both processes until then, the
token, and how many tokens of the prompt had not to be computed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil


def cpu_s() -> float:
    """Of this process and the engine's."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(cpu_time.user + cpu_time.system for cpu_time in times))


def main() -> None:
    """Answer prompts until the input ends."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = settings["transfer"]
    llm = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        enforce_eager=True,
        block_size=settings["block_size"],
        kv_cache_memory_bytes=512 << 20,
        max_model_len=settings["tokens"] + 64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False if transfer is None else None,
        **settings.get("settings", {}),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if transfer is not None:
            llm.reset_prefix_cache()
        prompt = json.loads(line)
        began, worked = time.perf_counter(), cpu_s()
        [answer] = llm.generate({"prompt_token_ids": prompt}, one_token, use_tqdm=False)
        reply = {
            "ttft_s": time.perf_counter() - began,
            "cpu_s": cpu_s() - worked,
            "token": answer.outputs[0].token_ids[0],
            "cached": answer.num_cached_tokens or 0,
        }
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
