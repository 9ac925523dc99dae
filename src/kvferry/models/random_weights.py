"""Random weights that make a small model a good test subject.

A model fresh from its library's initializer is a poor one: its logits are nearly flat, so that rounding decides the
greedy token, it repeats one token forever, and parameters that start at zero (biases, attention sinks) hide the
features they belong to. The weights made here are large and varied instead: greedy decoding wanders, depends on the
whole prompt, and every parameter matters.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

# The projections whose output a layer adds to the residual stream.
_OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


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
