"""The model's fingerprint, the same on every instance that serves the same weights in the same way.

vLLM's workers rearrange weights, each in its own way. The fingerprint is therefore made of three things: the
checkpoint's files, the model's configuration as vLLM has resolved it (`models.checkpoint`), and all of vLLM's settings
that are not known to be irrelevant. So a setting that a later release adds counts if it has another value than its
default.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from vllm import __version__

from kvferry.adapters.vllm.identity.loaded_files import before_loading
from kvferry.core.errors import ConfigError
from kvferry.models.checkpoint import checkpoint_name, plain, resolved_config

logger = logging.getLogger(__name__)

NOT_COMPARED = {
    "VllmConfig": """
        model_config cache_config load_config attention_config
        parallel_config scheduler_config device_config offload_config aux_output_config mamba_config kernel_config
        lora_config speculative_config watermark_config structured_outputs_config observability_config logging_config
        quant_config compilation_config profiler_config kv_transfer_config kv_events_config ec_transfer_config
        ec_manager_config reasoning_config instance_id optimization_level performance_mode weight_transfer_config
        shutdown_timeout""",
    "ModelConfig": """
        model model_weights tokenizer tokenizer_mode tokenizer_revision trust_remote_code dtype seed hf_config
        hf_text_config hf_config_path hf_overrides config_format hf_token revision code_revision is_submodel_config
        word_embeddings_untied_by_checkpoint allowed_local_media_path allowed_media_domains max_model_len
        spec_target_max_model_len allow_deprecated_quantization enforce_eager return_sampling_mask max_logprobs
        logprobs_mode use_fp64_gumbel enable_trace_replay disable_cascade_attn skip_tokenizer_init enable_prompt_embeds
        served_model_name generation_config override_generation_config enable_sleep_mode sleep_preserve_parameter_names
        sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
        logits_processors io_processor_plugin renderer_num_workers pooler_config multimodal_config""",
    "CacheConfig": """
        block_size user_specified_block_size kv_cache_layout prefix_match_unit gpu_memory_utilization is_attention_free
        num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval
        num_gpu_blocks num_cpu_blocks effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency
        hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size kv_offloading_backend
        skip_page_size_padded _block_size_resolved mamba_page_size_padded mamba_block_size mamba_cache_dtype
        mamba_ssm_cache_dtype mamba_cache_mode""",
    "LoadConfig": """
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device
        use_tqdm_on_load pt_load_map_location""",
    "MultiModalConfig": """
        limit_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
        mm_encoder_attn_backend mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings
        skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb""",
    "AttentionConfig": """
        backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
        flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        use_trtllm_attention mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
        flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size""",
    "LoRAConfig": """
        max_lora_rank max_loras fully_sharded_loras max_cpu_loras default_mm_loras specialize_active_lora
        max_lora_cls_labels""",
}
"""Settings by vLLM's configuration class that are left out. Either the KV of given tokens does not depend on them, or
layout, packing, salt or resolved configuration contains them."""

FROM_FILES = ("auto", "safetensors", "pt", "npcache", "mistral", "instanttensor", "sharded_state")
"""Values of `--load-format` with which vLLM reads the weights from the checkpoint's own files."""


def model_fingerprint(vllm_config: Any, weights: str = "") -> str:
    """The fingerprint: 32 hexadecimal digits. `weights`: a name for the weights, the same on all instances, instead of
    their content.

    Raises `OSError` if a file of the checkpoint cannot be read, and `ConfigError` if these weights cannot be
    distinguished from others, or if files have changed since vLLM began to load them.
    """
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if load_format == "dummy":
        weights = f"{weights} {__version__} {vllm_config.parallel_config.tensor_parallel_size} {model.seed}"
    if not weights and (model.model_weights or load_format not in FROM_FILES):
        raise ConfigError(
            f"with --load-format {load_format}, vLLM reads weights from elsewhere than {model.model!r}, and they cannot"
            ' be distinguished from other weights; name them, the same on all instances, with "model_fingerprint" in'
            " kv_connector_extra_config"
        )
    return checkpoint_name(
        model.model,
        config={"model": resolved_config(model.hf_config), "text": resolved_config(model.hf_text_config)},
        dtype=str(model.dtype).removeprefix("torch."),
        revision=model.revision,
        changes=_settings(vllm_config),
        weights=weights,
        before=None if weights else before_loading(model),
        on_progress=_show_progress,
    )


def _settings(vllm_config: Any) -> dict[str, Any]:
    """Settings beside the model's configuration that may change the KV of the same weights."""
    model = vllm_config.model_config
    parts = (
        *(vllm_config, model, vllm_config.cache_config, vllm_config.load_config, vllm_config.attention_config),
        *([model.multimodal_config] if model.multimodal_config is not None else []),
    )
    settings = {
        f"{type(part).__name__}.{name}": value for part in parts for name, value in changed_settings(part).items()
    }
    # Some models choose the factors of their rotary embedding or of their attention by this setting (longrope, Llama
    # 4).
    settings["max_model_len"] = model.max_model_len
    return settings


def changed_settings(config: Any) -> dict[str, Any]:
    """The settings of one of vLLM's configuration objects that differ from their defaults and are not known to be
    irrelevant."""
    harmless = NOT_COMPARED[type(config).__name__].split()
    fields = [field for field in dataclasses.fields(config) if field.name not in harmless]
    values = {field.name: plain(getattr(config, field.name)) for field in fields}
    return {field.name: values[field.name] for field in fields if values[field.name] != _default(field)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if get_default := getattr(
        field.default, "get_default", None
    ):  # pydantic writes a default with its bounds like this
        return plain(get_default(call_default_factory=True))
    if field.default_factory is not dataclasses.MISSING:
        return plain(field.default_factory())
    return None if field.default is dataclasses.MISSING else plain(field.default)


def _show_progress(done: int, total: int) -> None:
    logger.info("naming the checkpoint by its content: %.1f of %.1f GB read", done / 1e9, total / 1e9)
