"""Every decoder-only family of the installed transformers, made small, with the options that a family has.

A case is one configuration. Its sizes are the usual ones made small by name (`SMALL`), then what its family needs
(`FAMILY`), then its own. Windows and trained contexts are shorter than the prompts of the sweep, so that they count.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvferry.models.random_model import DEFAULT_TOKENIZER, randomize

LARGEST = 40_000_000
"""Parameters of the largest model that is tried."""
WINDOW = 8
TRAINED_CONTEXT = 32

SMALL: dict[str, Any] = {
    "vocab_size": 512, "vocab_size_per_layer_input": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sep_token_id": 2, "decoder_start_token_id": 1,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "ffn_hidden_size": 96, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_heads": 4, "num_heads": 4, "head_dim": 16,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512, "max_sequence_length": 512,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "rope_theta": 10000.0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "num_shared_experts": 1,
    "shared_expert_intermediate_size": 48, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip

_LATENT = {"num_key_value_heads": 4}
_DECODER = {"is_decoder": True}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_LOCAL_THEN_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"], _LATENT),
    **dict.fromkeys(["glm4_moe_lite", "glm_moe_dsa", "youtu", "dots3_note_text"], _LATENT),
    **dict.fromkeys(["bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta"], _DECODER),
    **dict.fromkeys(["roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "reformer"], _DECODER),
    "minicpm3": _LATENT | {"dim_model_base": 64, "scale_emb": 1},
    "roc_bert": _DECODER | {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": _DECODER | {"default_language": "en_XX"},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gemma2": {"layer_types": _LOCAL_THEN_FULL, "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": _LOCAL_THEN_FULL, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "layer_types": _LOCAL_THEN_FULL,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {"layer_types": _LOCAL_THEN_FULL},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "longcat_flash": _LATENT
    | {"head_dim": 8, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "zero_expert_num": 2, "moe_topk": 2},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Case:
    """One configuration. `by_forward`: the reference computes each token from the whole sequence, without a cache."""

    family: str
    option: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    by_forward: bool = False

    @property
    def name(self) -> str:
        """Unique, for people."""
        return f"{self.family} {self.option}".strip()


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """A configuration's rotary embedding of a kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def longrope(num_factors: int, **parameters: Any) -> dict[str, Any]:
    """The same of Phi-3's kind; `num_factors` is half of the rotated dimensions."""
    factors = {
        "short_factor": [1.0 + index / 8 for index in range(num_factors)],
        "long_factor": [3.0 + index for index in range(num_factors)],
        "original_max_position_embeddings": TRAINED_CONTEXT,
    }
    return rope("longrope", **factors, **parameters)


_TIED, _BIAS = {"tie_word_embeddings": True}, {"attention_bias": True}
_PHI3_LONG = {"original_max_position_embeddings": TRAINED_CONTEXT, "sliding_window": None}
OPTIONS: list[Case] = [
    Case("llama", "tied", _TIED),
    Case("llama", "biases", _BIAS | {"mlp_bias": True}),
    Case("llama", "one KV head", {"num_key_value_heads": 1}),
    Case("llama", "odd head size", {"head_dim": 20}),
    Case("llama", "linear rope", rope("linear", factor=4.0)),
    Case("llama", "dynamic rope", rope("dynamic", factor=4.0)),
    Case("llama", "yarn", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Case("llama", "llama3 rope", rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    Case("llama", "longrope", longrope(8), by_forward=True),
    Case("mistral", "without a window", {"sliding_window": None}),
    Case("mistral", "window beyond the prompts", {"sliding_window": 100}),
    Case("moshi", "window beyond the prompts", {"sliding_window": 100}),
    Case("moshi", "window of the longest sequence", {"sliding_window": 512}),
    Case("lfm2", "without convolutions", {"layer_types": ["full_attention"] * 4}),
    Case("lfm2_moe", "without convolutions", {"layer_types": ["full_attention"] * 4}),
    Case("mistral", "yarn", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Case("mixtral", "without a window", {"sliding_window": None}),
    Case("mixtral", "one expert a token", {"num_experts_per_tok": 1}),
    Case("qwen2", "window", {"use_sliding_window": True, "max_window_layers": 2}),
    Case("qwen2", "tied", _TIED),
    Case("qwen2", "yarn", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Case("qwen2_moe", "window", {"use_sliding_window": True, "max_window_layers": 3}),
    Case("qwen2_moe", "normed experts", {"norm_topk_prob": True}),
    Case("qwen2_moe", "some dense layers", {"mlp_only_layers": [0, 2]}),
    Case("qwen3", "window", {"use_sliding_window": True, "max_window_layers": 2}),
    Case("qwen3", "tied", _TIED),
    Case("qwen3", "bias", _BIAS),
    Case("qwen3_moe", "normed experts", {"norm_topk_prob": True}),
    Case("qwen3_moe", "sparse step", {"decoder_sparse_step": 2}),
    Case("qwen3_moe", "window", {"use_sliding_window": True, "max_window_layers": 2}),
    Case("phi3", "without a window", {"sliding_window": None}),
    Case("phi3", "longrope (Phi-3.5)", _PHI3_LONG | longrope(8)),
    Case("phi3", "longrope and window (Phi-3)", {"original_max_position_embeddings": TRAINED_CONTEXT} | longrope(8)),
    Case("phi3", "partial longrope, tied (Phi-4-mini)",
         _PHI3_LONG | _TIED | longrope(6, partial_rotary_factor=0.75)),
    Case("phimoe", "without a window", {"sliding_window": None}),
    Case("phimoe", "longrope (Phi-3.5-MoE)", {
        **longrope(8, short_mscale=1.2, long_mscale=1.3), "sliding_window": None,
        "original_max_position_embeddings": TRAINED_CONTEXT}),
    Case("phimoe", "biases", _BIAS | {"lm_head_bias": True}),
    Case("phi", "normed queries", {"qk_layernorm": True}),
    Case("phi", "full rotation", {"partial_rotary_factor": 1.0}),
    Case("gemma", "untied", {"tie_word_embeddings": False}),
    Case("gemma2", "low caps", {"attn_logit_softcapping": 10.0, "final_logit_softcapping": 20.0}),
    Case("gemma2", "without caps", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Case("gemma3_text", "all full", {"layer_types": ["full_attention"] * 4}),
    Case("gemma3_text", "scaled rope", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    Case("gemma3n_text", "no shared KV", {"num_kv_shared_layers": 0}),
    Case("gemma4_text", "shared KV", {"num_kv_shared_layers": 2}),
    Case("gemma4_text", "shared KV, wide layers", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    Case("gemma4_text", "values are keys", {"attention_k_eq_v": True}),
    Case("gemma4_text", "experts", {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}),
    Case("gpt2", "untied", {"tie_word_embeddings": False}),
    Case("gpt2", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True}),
    Case("gpt2", "unscaled", {"scale_attn_weights": False}),
    Case("gpt_bigcode", "all heads", {"multi_query": False}),
    Case("gpt_neox", "one after the other", {"use_parallel_residual": False}),
    Case("gpt_neox", "full rotation", {"rotary_pct": 1.0}),
    Case("gpt_neox", "without bias", {"attention_bias": False}),
    Case("gpt_oss", "all full", {"layer_types": ["full_attention"] * 4}),
    Case("opt", "projected embeddings", {"word_embed_proj_dim": 32}),
    Case("opt", "norms after", {"do_layer_norm_before": False}),
    Case("opt", "without bias", {"enable_bias": False}),
    Case("starcoder2", "without a window", {"sliding_window": None}),
    Case("starcoder2", "without bias", {"use_bias": False}),
    Case("cohere", "normed queries", {"use_qk_norm": True}),
    Case("cohere2", "all full", {"layer_types": ["full_attention"] * 4}),
    Case("olmo", "clipped", {"clip_qkv": 0.5}),
    Case("olmo3", "all full", {"layer_types": ["full_attention"] * 4}),
    Case("olmoe", "clipped, normed experts", {"clip_qkv": 0.5, "norm_topk_prob": True}),
    Case("deepseek_v2", "whole queries", {"q_lora_rank": None}),
    Case("deepseek_v3", "whole queries", {"q_lora_rank": None}),
    Case("deepseek_v3", "no shared experts", {"n_shared_experts": 0}),
    Case("deepseek_v3", "yarn", rope(
        "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64)),
    Case("deepseek_v3", "all dense", {"first_k_dense_replace": 4}),
    Case("granite", "multipliers", {
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    Case("granitemoe", "multipliers", {
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    Case("smollm3", "some layers unrotated", {"no_rope_layers": [1, 0, 1, 0]}),
    Case("smollm3", "window", {"use_sliding_window": True, "layer_types": _LOCAL_THEN_FULL}),
    Case("exaone4", "all full", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Case("exaone4", "mixed", {"layer_types": _LOCAL_THEN_FULL}),
    Case("nemotron", "full rotation", {"partial_rotary_factor": 1.0}),
    Case("persimmon", "plain queries", {"qk_layernorm": False}),
    Case("longcat_flash", "tied", _TIED),
    Case("minimax_m3_vl_text", "sparse", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}),
    Case("glm", "full rotation", {"partial_rotary_factor": 1.0}),
    Case("glm4_moe", "normed queries", {"use_qk_norm": True}),
    Case("ernie4_5", "bias", {"use_bias": True}),
    Case("seed_oss", "without bias", {"attention_bias": False, "attention_out_bias": False}),
    Case("ministral3", "without a window", {"sliding_window": None}),
    Case("bitnet", "tied", _TIED),
    Case("arcee", "mlp bias", {"mlp_bias": True}),
    Case("helium", "tied", _TIED),
    Case("minicpm3", "longrope", longrope(4) | {"original_max_position_embeddings": TRAINED_CONTEXT}, by_forward=True),
    Case("afmoe", "all full", {"layer_types": ["full_attention"] * 4}),
    Case("jetmoe", "one expert a token", {"num_experts_per_tok": 1}),
    Case("falcon", "alibi", {"alibi": True}),
    Case("mistral", "longrope", longrope(8) | {"sliding_window": None}, by_forward=True),
    Case("qwen2", "longrope, tied", longrope(8) | _TIED, by_forward=True),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Each family once as it is, then those with options."""
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield Case(family)
    yield from OPTIONS


class CannotBuildSmall(Exception):
    """transformers itself does not make or run such a model at this size."""


def make_config(case: Case) -> Any:
    """The configuration of a case. Raises `CannotBuildSmall`."""
    kind = CONFIG_MAPPING[case.family]
    try:
        config = kind(**{**_sizes(kind), **FAMILY.get(case.family, {}), **case.settings})
    except Exception as error:
        raise CannotBuildSmall(_line(error)) from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.family]]
    return config


def _sizes(kind: Any) -> dict[str, Any]:
    """What of `SMALL` a kind of configuration knows, and the same for those of its text and its pictures."""
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})} - set(kind.attribute_map)
    inside = {name: part for name, part in kind.sub_configs.items() if name in ("text_config", "vision_config")}
    parts = {name: _sizes(part) for name, part in inside.items() if hasattr(part, "sub_configs")}
    return {name: value for name, value in SMALL.items() if name in known} | parts


def make_model(case: Case, folder: Path) -> Any:
    """Write the checkpoint of a case with random weights; returns the model. Raises `CannotBuildSmall`."""
    config = make_config(case)
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise CannotBuildSmall(_line(error)) from error
    if size > LARGEST:
        raise CannotBuildSmall(f"{size:,} parameters at the least")
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize(model, 0)
        model.save_pretrained(folder)
    except Exception as error:
        raise CannotBuildSmall(_line(error)) from error
    assert DEFAULT_TOKENIZER is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEFAULT_TOKENIZER / name, folder / name)
    return model


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
