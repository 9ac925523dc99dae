"""The model's fingerprint, the same on every instance that serves the same weights.

vLLM's workers rearrange weights, each in its own way, so the fingerprint comes from the checkpoint
(`models.checkpoint`), as in kvferry's own engine, and from the settings of vLLM that the KV depends on.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from vllm import __version__

from kvferry.models.checkpoint import checkpoint_name

log = logging.getLogger(__name__)


def model_fingerprint(vllm_config: Any) -> str:
    """32 hexadecimal digits. Raises `OSError` if a file of the checkpoint cannot be read."""
    model = vllm_config.model_config
    return checkpoint_name(
        model.model,
        dtype=str(model.dtype).removeprefix("torch."),
        revision=model.revision,
        changes=_changes(vllm_config),
        with_weights=vllm_config.load_config.load_format != "dummy",
        on_progress=_tell,
    )


def _changes(vllm_config: Any) -> dict[str, str]:
    """Settings with which the same checkpoint gives other KV; empty if vLLM runs it unchanged."""
    model, cache_dtype = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    changes: dict[str, str] = {}
    if model.quantization is not None:
        changes["quantization"] = str(model.quantization)
    if cache_dtype != "auto":
        changes["kv_cache_dtype"] = cache_dtype
    if model.hf_overrides:
        changes["hf_overrides"] = json.dumps(model.hf_overrides, sort_keys=True, default=_name_of)
    if _scales_by_length(model.hf_text_config):
        changes["max_model_len"] = str(model.max_model_len)
    if vllm_config.load_config.load_format == "dummy":  # random weights depend on the release and the number of ranks
        changes["dummy"] = f"vllm {__version__}, {vllm_config.parallel_config.tensor_parallel_size} ranks"
    return changes


def _scales_by_length(text_config: Any) -> bool:
    """Whether vLLM chooses the factors of the rotary embedding by `max_model_len`."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kinds = {value for key, value in _flat(rope) if key in ("rope_type", "type")}
    return bool(kinds & {"longrope", "su", "dynamic"})


def _flat(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """The settings, including those of each kind of layer if there are several."""
    nested = [item for value in settings.values() if isinstance(value, dict) for item in _flat(value)]
    return [*((key, value) for key, value in settings.items() if isinstance(value, str)), *nested]


def _name_of(override: object) -> str:
    """The name of a function that changes the configuration."""
    return f"{getattr(override, '__module__', '')}.{getattr(override, '__qualname__', type(override).__name__)}"


def _tell(done: int, total: int) -> None:
    log.info("naming the checkpoint by its content: %.1f of %.1f GB read", done / 1e9, total / 1e9)
