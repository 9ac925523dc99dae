"""Paths of vLLM's and SGLang's servers that this engine does not serve: its 404 says so, and what does."""

from __future__ import annotations

_VLLM = "vLLM behind the router has it"
_BOTH = "vLLM and SGLang behind the router have it"
_SGLANG = "SGLang behind the router has it"

_PATHS = {
    "/v1/embeddings": f"{_BOTH}, with a model for embeddings",
    "/v2/embed": f"{_VLLM}, with a model for embeddings",
    "/pooling": f"{_VLLM}, with a pooling model",
    "/classify": f"{_BOTH}, with a classifier",
    "/v1/classify": f"{_SGLANG}, with a classifier",
    "/score": f"{_VLLM}, with a model for scores",
    "/v1/score": f"{_BOTH}, with a model for scores",
    "/rerank": f"{_VLLM}, with a model for scores",
    "/v1/rerank": f"{_BOTH}, with a model for scores",
    "/v2/rerank": f"{_VLLM}, with a model for scores",
    "/generative_scoring": _VLLM,
    "/v1/audio": f"{_BOTH}, with a speech model",
    "/v1/realtime": f"{_BOTH}, with a speech model",
    "/v1/chat/completions": f"of its sub-paths, {_VLLM.replace('has it', 'has batch, render and derender')}",
    "/v1/completions": f"of its sub-paths, {_VLLM.replace('has it', 'has render and derender')}",
    "/inference/v1/generate": f"{_VLLM}; send token ids as prompt of /v1/completions",
    "/generate": f"{_SGLANG}; use /v1/completions",
    "/v1/load_lora_adapter": _VLLM,
    "/v1/unload_lora_adapter": _VLLM,
    "/health_generate": "use /health",
    "/get_server_info": "use /kvferry/instance",
    "/get_model_info": "use /kvferry/instance",
    "/model_info": "use /kvferry/instance",
    "/flush_cache": "use /reset_prefix_cache",
    "/abort_request": "use /abort_requests; a client that closes its connection ends its request",
}
"""Alternatives for each path and the paths below it."""


def explain_path(path: str) -> str | None:
    """The message of the 404 for a path of other servers; None for other paths."""
    prefix = path
    while prefix and prefix not in _PATHS:
        prefix = prefix.rpartition("/")[0]
    return f"{path} is not served by kvferry's engine: {_PATHS[prefix]}" if prefix else None
