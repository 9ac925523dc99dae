"""Step *lmcache*: a long prompt whose KV is in host memory, beside computing it; inside vLLM, with kvferry's connector
and with LMCache's."""

from __future__ import annotations

from typing import Any

from gpu.context import Context
from gpu.models import llama
from reuse_vllm import COMPUTED, measure_vllm

TIER_BYTES = 2 << 30
SIDES: dict[str, dict[str, Any]] = {
    "kvferry, CPU tier": {
        "kv_connector": "KvferryKVStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "memory:2GiB?name=make-gpu"},
    },
    "LMCache, CPU tier": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
}


def run(context: Context) -> None:
    """The time to the first token of a hit, over that of computing the prompt, in turns."""
    python = context.vllm_python()
    tokens = 300 if context.small else 6000
    settings: dict[str, Any] = {} if context.small else {"gpu_memory_utilization": 0.1}
    request = {
        "model": llama(context),
        "dtype": "float32" if context.small else "bfloat16",
        "block_size": 32,
        "tokens": tokens,
        "question": 16,
        "vocab": 500 if context.small else 32000,
        "settings": settings,
    }
    environment = {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(TIER_BYTES >> 30),
        "LMCACHE_CHUNK_SIZE": "256",
    }
    sides = measure_vllm(
        python, request, SIDES, context.scratch("lmcache"), 2 if context.small else 3, 0.2, environment
    )
    computed = sides[COMPUTED]["ttft_s"] * 1e3
    context.record.duration(f"a prompt of {tokens} tokens, computed: TTFT", computed, "ms")
    for name in SIDES:
        figures = sides[name]
        if "ttft_s" not in figures:
            context.record.note(f"{name} does not run: {figures['does not run']}")
            continue
        hit = figures["ttft_s"] * 1e3
        context.record.duration(f"a hit, {name}: TTFT", hit, "ms", ("computed", computed))
