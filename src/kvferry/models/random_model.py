"""Make small models with random weights, of any architecture, for tests and benchmarks.

A model fresh from its library's initializer is a poor test subject: its logits are nearly flat, so that rounding
decides the greedy token, it repeats one token forever, and parameters that start at zero (biases, attention sinks) hide
the features they belong to. The weights made here are large and varied instead: greedy decoding wanders, depends on the
whole prompt, and every parameter matters.

On the command line::

    python -m kvferry.models.random_model llama OUT_DIR --set hidden_size=768 --set num_hidden_layers=12
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

_BUILTIN_TOKENIZER = Path(__file__).with_name("tiny_python")

DEFAULT_TOKENIZER: Path | None = _BUILTIN_TOKENIZER if (_BUILTIN_TOKENIZER / "tokenizer.json").is_file() else None
"""Directory of the tokenizer of ``kvferry/tiny-python``; ``None`` where the package lacks it."""

DEFAULT_VOCABULARY_SIZE = 512
"""Size of the vocabulary of a model made without a tokenizer."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Windows are far shorter than test prompts, so that a wrong window changes the output.
_WINDOW = 32

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_WINDOW_THEN_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": _WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mixtral": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "layer_types": _WINDOW_THEN_GLOBAL,
        # Caps this low bend the scores and logits of a tiny model; the usual 50 and 30 would not.
        "attn_logit_softcapping": 10.0,
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "phi3": {"original_max_position_embeddings": 4096},
    "olmo2": {},
    "gpt_oss": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
        "layer_types": _WINDOW_THEN_GLOBAL,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "falcon": {"ffn_hidden_size": 128},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": _WINDOW,
    },
}
"""Architectures with tiny defaults, by transformers ``model_type``, and their differences from the common ones."""

ALIASES: dict[str, str] = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Shorter names of architectures whose language model has a ``model_type`` of its own."""

# The projections whose output a layer adds to the residual stream.
_OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def make_random_model(
    directory: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: Path | None = DEFAULT_TOKENIZER,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random model, and a tokenizer beside it, in the transformers format.

    The same arguments give the same weights, whatever the number of threads.

    Args:
        directory: Where to write; created if it is missing.
        architecture: A key of ``ARCHITECTURES`` or ``ALIASES``, or any other ``model_type`` that
            transformers knows, whose sizes then come from ``overrides``.
        seed: Seed of the weights.
        dtype: Name of a torch floating-point type, such as ``"float32"`` or ``"bfloat16"``.
        tokenizer: A directory with a ``tokenizer.json``, whose files are copied; ``None`` for a model
            without a tokenizer.
        max_shard_size: Largest safetensors file, such as ``"200KB"``; a larger model is split.
        overrides: Values for the architecture's configuration, such as ``num_hidden_layers=12``.

    Returns:
        ``directory``.

    Raises:
        ValueError: The architecture or dtype is unknown, a value does not fit the configuration, or the
            vocabulary is smaller than the tokenizer's.
        FileNotFoundError: ``tokenizer`` holds no ``tokenizer.json``.
    """
    torch_dtype = _torch_dtype(dtype)
    config = make_config(architecture, tokenizer=tokenizer, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype).eval()
    randomize(model, seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    for path in directory.glob("*.safetensors"):
        # The library writes weights for the owner's eyes only; models are shared like any other file.
        path.chmod(0o644)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, directory)
    return directory


def make_config(architecture: str, *, tokenizer: Path | None = DEFAULT_TOKENIZER, **overrides: Any) -> Any:
    """Build the transformers configuration that ``make_random_model`` uses; arguments as there."""
    model_type = ALIASES.get(architecture, architecture)
    if model_type not in CONFIG_MAPPING:
        close = ", ".join(difflib.get_close_matches(model_type, list(CONFIG_MAPPING))) or ", ".join(ARCHITECTURES)
        raise ValueError(f"transformers knows no architecture {architecture!r}; perhaps one of: {close}")
    tokens = _token_values(tokenizer)
    values = tokens | (_COMMON | ARCHITECTURES[model_type] if model_type in ARCHITECTURES else {}) | overrides
    if tokenizer is not None and values["vocab_size"] < tokens["vocab_size"]:
        raise ValueError(f"vocab_size {values['vocab_size']} is smaller than the tokenizer's vocabulary")
    if "num_hidden_layers" in overrides and "layer_types" in values and "layer_types" not in overrides:
        pattern, layers = values["layer_types"], values["num_hidden_layers"]
        values["layer_types"] = [pattern[layer % len(pattern)] for layer in range(layers)]
    try:
        config = AutoConfig.for_model(model_type, **values)
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no causal language model of architecture {architecture!r}")
    return config


def randomize(model: Any, seed: int) -> None:
    """Overwrite every saved tensor of ``model`` with random values at scales that keep it lively.

    Each tensor has a generator of its own, seeded by its name, so that adding a tensor does not change
    the others.
    """
    config: Any = model.config.get_text_config()
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        mean, deviation = _distribution(name, tensor, config)
        tensor.copy_(values * deviation + mean)


def _distribution(name: str, tensor: torch.Tensor, config: Any) -> tuple[float, float]:
    """Return mean and standard deviation for the tensor called ``name``, ``[out, in]`` if a matrix."""
    hidden = config.hidden_size
    if "embed_tokens" in name or "word_embeddings" in name:
        return 0.0, _embedding_deviation(config) / _embedding_factor(config)
    if name.startswith("lm_head"):
        return 0.0, 4.0 / math.sqrt(hidden)
    if name.endswith("sinks"):
        return 1.0, 1.0
    if tensor.ndim <= 1 or name.endswith("bias"):
        return _vector_distribution(name, tensor, config)
    if "router" in name or name.endswith("gate.weight"):
        return 0.0, 2.0 / math.sqrt(hidden)
    inputs = hidden if tensor.ndim == 3 else tensor.shape[-1]
    return 0.0, 1.5 / math.sqrt(inputs) * _output_factor(name, config)


def _vector_distribution(name: str, tensor: torch.Tensor, config: Any) -> tuple[float, float]:
    """Return mean and standard deviation for a bias (around 0) or a norm's gain (around its start)."""
    if name.endswith("bias"):
        return 0.0, 0.2
    gain = _output_factor(name, config)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Normalized queries and keys give scores with a deviation of 1, too flat to tell tokens apart.
        gain = 1.6
    if name in ("model.norm.weight", "transformer.ln_f.weight") and config.tie_word_embeddings:
        # This brings the logits to a standard deviation of 4, as the head does where it is not tied.
        gain = 4.0 * _embedding_factor(config) / (_embedding_deviation(config) * math.sqrt(config.hidden_size))
    # Gemma stores the gains of its norms less one, so that they start at zero.
    starts_at_one = float(tensor.float().mean()) > 0.5
    return gain if starts_at_one else gain - 1.0, 0.2 * gain


def _output_factor(name: str, config: Any) -> float:
    """Return the factor by which the output of a layer is larger than usual.

    With tied embeddings the input token would win the next logit and decoding would repeat it. Later
    layers that drown out the embedding in the residual stream prevent this.
    """
    digits = [part for part in name.split(".") if part.isdigit()]
    outputs = _POST_NORMS if config.model_type.startswith("gemma") else _OUTPUT_PROJECTIONS
    if not config.tie_word_embeddings or not digits or name.split(".")[-2] not in outputs:
        return 1.0
    return 1.0 + 4.0 * int(digits[0]) / max(1, config.num_hidden_layers - 1)


def _embedding_deviation(config: Any) -> float:
    """Return the standard deviation of the embeddings as they enter the first layer."""
    return 0.5 if config.tie_word_embeddings else 1.0


def _embedding_factor(config: Any) -> float:
    """Return the factor by which the architecture multiplies its input embeddings."""
    return math.sqrt(config.hidden_size) if config.model_type.startswith("gemma") else 1.0


def _torch_dtype(name: str) -> torch.dtype:
    """Look up a floating-point type by name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is not a floating-point type of torch")
    return dtype


def _token_values(tokenizer: Path | None) -> dict[str, Any]:
    """Return the vocabulary size and special token ids for the configuration."""
    if tokenizer is None:
        return {"vocab_size": DEFAULT_VOCABULARY_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if not (tokenizer / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer.json in {tokenizer}")
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    return {
        "vocab_size": len(loaded),
        "pad_token_id": loaded.pad_token_id,
        "bos_token_id": loaded.bos_token_id,
        "eos_token_id": loaded.eos_token_id,
    }


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the files of a tokenizer; missing ones are optional."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _parse_setting(text: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``; a value that is not JSON is taken as a string."""
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.models.random_model",
        description="Write a small language model with random weights, for tests and benchmarks.",
        epilog="examples:\n"
        "  %(prog)s llama build/llama\n"
        "  %(prog)s llama build/medium --dtype bfloat16 --set hidden_size=768 --set num_hidden_layers=12 \\\n"
        "      --set num_attention_heads=12 --set num_key_value_heads=4 --set head_dim=64\n"
        "  %(prog)s gemma2 build/gemma2 --set sliding_window=16 --max-shard-size 200KB\n"
        "  %(prog)s smollm3 build/other --set hidden_size=64 --set num_hidden_layers=2 ...\n\n"
        f"architectures with tiny defaults: {', '.join([*ARCHITECTURES, *ALIASES])}.\n"
        "Any other model_type known to transformers works too, with its sizes given by --set.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("architecture", help="transformers model_type, such as llama or gpt_oss")
    parser.add_argument("directory", type=Path, metavar="OUT_DIR", help="where to write the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--dtype", default="float32", help="type of the weights (default: float32)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=DEFAULT_TOKENIZER,
        metavar="DIR",
        help="directory of the tokenizer to copy (default: the tokenizer of kvferry/tiny-python)",
    )
    parser.add_argument(
        "--no-tokenizer",
        action="store_const",
        const=None,
        dest="tokenizer",
        help=f"write no tokenizer; the vocabulary then has {DEFAULT_VOCABULARY_SIZE} tokens",
    )
    parser.add_argument("--max-shard-size", default="5GB", help="split larger weight files (default: 5GB)")
    parser.add_argument(
        "--set",
        type=_parse_setting,
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a value for the configuration, as JSON or a plain string; may be given many times",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        make_random_model(
            options.directory,
            options.architecture,
            seed=options.seed,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            max_shard_size=options.max_shard_size,
            **dict(options.settings),
        )
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    size = sum(each.stat().st_size for each in options.directory.glob("*.safetensors"))
    sys.stdout.write(f"{options.architecture} in {options.directory}: {size / 1e6:.1f} MB of weights\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
