"""A model that was made fast computes what it computed, and what does not fit is left alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from kvferry.engine.ops.linear import PackedLinear
from kvferry.engine.ops.native import library
from kvferry.engine.ops.transform import optimize

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")

PLAIN = "kvferry_test_plain"
ALL = {"RMSNorm", "MLP", "Attention", "DecoderLayer", "Linear"}
PARTS = ALL | {"Experts"}
REPLACED = {
    "llama": ALL,
    "mistral": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "qwen3_moe": {"RMSNorm", "Attention", "Experts", "Linear"},
    "mixtral": {"RMSNorm", "Attention", "Experts", "Linear"},
    "gemma2": {"RMSNorm", "MLP", "Attention", "Linear"},  # its layers have more norms
    "gemma3": {"RMSNorm", "MLP", "Attention", "Linear"},
    "phi3": {"RMSNorm", "MLP", "Linear"},  # its query, key and value come joined
    "olmo2": {"RMSNorm", "MLP", "Linear"},  # it norms query and key across heads
    "gpt_oss": {"RMSNorm", "Attention", "Experts", "Linear"},
    "deepseek_v3": {"RMSNorm", "MLP", "Experts", "Linear"},
}


def attend_plainly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention with all that a family may ask for; an interface like the engine's, without pages."""
    group, places = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    key, value = key.repeat_interleave(group, dim=1).float(), value.repeat_interleave(group, dim=1).float()
    scores = query.float() @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (sliding_window or len(places)))
    scores = scores.masked_fill(~seen, float("-inf"))
    sinks = scores.new_full((query.shape[1],), float("-inf")) if s_aux is None else s_aux.float()
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).to(query.dtype).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    AttentionInterface.register(PLAIN, attend_plainly)
    with torch.no_grad():
        yield


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=PLAIN).eval()


def logits_of(model: Any, *shape: int) -> Tensor:
    ids = torch.arange(shape[0] * shape[1]).view(shape) * 31 % 500
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("architecture", REPLACED)
def test_logits_stay_the_same(architecture: str, model_maker: Any) -> None:
    model = load(model_maker(architecture))
    before = [logits_of(model, 1, 60), logits_of(model, 3, 7), logits_of(model, 1, 1)]
    done = optimize(model)
    after = [logits_of(model, 1, 60), logits_of(model, 3, 7), logits_of(model, 1, 1)]
    for ours, theirs in zip(after, before, strict=True):
        assert difference(ours, theirs) < 1e-5
    assert {suffix for suffix in PARTS for name, count in done.items() if count and name.endswith(suffix)} == (
        REPLACED[architecture]
    )


def test_bfloat16_stays_as_near_to_float32_as_it_was(model_maker: Any) -> None:
    folder = model_maker("llama")
    exact, model = logits_of(load(folder), 1, 60), load(folder, torch.bfloat16)
    before = difference(logits_of(model, 1, 60), exact)
    assert optimize(model)["LlamaDecoderLayer"] == 3
    assert difference(logits_of(model, 1, 60), exact) < 1.1 * before


def test_a_cache_of_transformers_still_works(model_maker: Any) -> None:
    model = load(model_maker("qwen3"))
    ids = torch.tensor([[5, 9, 300, 42]])
    expected = model(ids, use_cache=False).logits
    optimize(model)
    first = model(ids[:, :3], use_cache=True)
    assert first.past_key_values.get_seq_length() == 3
    assert difference(first.logits, expected[:, :3]) < 1e-5


def test_the_original_weights_are_freed(model_maker: Any) -> None:
    model = load(model_maker("llama", num_hidden_layers=6, intermediate_size=512))

    def plain_bytes() -> int:
        gc.collect()
        return sum(x.nbytes for x in gc.get_objects() if type(x) is nn.Parameter and x.ndim == 2 and not x.is_meta)

    others = plain_bytes() - sum(x.weight.nbytes for x in model.modules() if isinstance(x, nn.Linear))
    optimize(model)
    assert plain_bytes() == others
    assert not [x for x in model.modules() if isinstance(x, nn.Linear)]


class HalfMLP(LlamaMLP):
    """Looks like every other, and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class MishMLP(LlamaMLP):
    """Has an activation that the kernels do not know."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.mish(self.gate_proj(x)) * self.up_proj(x))


class ClampedMLP(LlamaMLP):
    """Differs only where values are large."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x).clamp(-500, 500))


@pytest.mark.parametrize("kind", [HalfMLP, MishMLP, ClampedMLP])
def test_what_looks_alike_but_computes_something_else_is_left_alone(kind: type[LlamaMLP], model_maker: Any) -> None:
    model = load(model_maker("llama"))
    odd = model.model.layers[1].mlp
    odd.__class__ = kind
    before = logits_of(model, 1, 20)
    done = optimize(model)
    assert (done["LlamaMLP"], done[kind.__name__], done["LlamaDecoderLayer"]) == (2, 0, 2)
    assert isinstance(odd.gate_proj, PackedLinear)
    assert difference(logits_of(model, 1, 20), before) < 1e-5


def test_a_module_with_hooks_keeps_them(model_maker: Any) -> None:
    model = load(model_maker("llama"))
    seen: list[Tensor] = []
    layer = model.model.layers[0]
    layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    done = optimize(model)
    seen.clear()
    logits_of(model, 1, 4)
    assert len(seen) == 1
    assert (done["LlamaAttention"], done["LlamaDecoderLayer"]) == (2, 2)


def test_other_formats_are_left_alone(model_maker: Any) -> None:
    model = load(model_maker("llama"), torch.float16)
    assert not optimize(model)
    assert isinstance(model.lm_head, nn.Linear)


def test_the_attention_function_is_put_back(model_maker: Any) -> None:
    model = load(model_maker("llama"))
    optimize(model)
    assert model.config._attn_implementation == PLAIN


def test_a_workspace_grows_with_the_step(model_maker: Any) -> None:
    model, untouched = load(model_maker("llama")), load(model_maker("llama"))
    optimize(model)
    for length in (1, 300, 2, 301, 300):
        assert difference(logits_of(model, 1, length), logits_of(untouched, 1, length)) < 1e-5
