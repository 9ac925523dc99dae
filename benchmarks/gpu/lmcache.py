"""Step *lmcache*: a long prompt whose KV is in host memory, beside computing it; inside vLLM, with kvferry's connector
and with LMCache's."""

from __future__ import annotations

from typing import Any

from gpu.context import Context
from gpu.models import llama
from reuse_vllm import COMPUTED, measure_in_turns, started_sides

TIER_BYTES = 2 << 30
MEASURING_S = 20.0
"""Seconds for all prompts, and for the end of the processes; sides that are not up before are left out."""
OWN = "kvferry, CPU tier"
SIDES: dict[str, dict[str, Any]] = {
    OWN: {
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
        "PYTHONHASHSEED": "0",  # LMCache's keys are hashes, which vLLM's processes have to agree on
    }
    folder, start_s = context.scratch("lmcache"), context.left_s - MEASURING_S
    with started_sides(python, request, SIDES, folder, 0.2, environment, start_s) as (up, missing):
        _record(context, tokens, missing | measure_in_turns(up, request, 2 if context.small else 3))


def _record(context: Context, tokens: int, sides: dict[str, Any]) -> None:
    computed = sides[COMPUTED]["ttft_s"] * 1e3
    context.record.duration(f"a prompt of {tokens} tokens, computed: TTFT", computed, "ms")
    for name in SIDES:
        figures = sides[name]
        if "ttft_s" not in figures:
            if name == OWN:  # vLLM itself runs
                context.record.check(f"{name} runs", False, figures["does not run"])
            else:
                context.record.note(f"{name} does not run: {figures['does not run']}")
            continue
        hit = figures["ttft_s"] * 1e3
        context.record.duration(f"a hit, {name}: TTFT", hit, "ms", ("computed", computed))
        differing = figures["num_differing"]
        if context.small:
            context.record.check(f"{name}: the tokens that are computed", not differing, f"{differing} differ")
        elif differing:  # in bfloat16 another token may be as good
            context.record.note(f"{name}: {differing} first tokens differ from those that are computed")
