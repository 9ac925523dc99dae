"""The fused experts compute what transformers' modules do, for every token alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kvferry.engine.ops.decoder_layer import Workspace
from kvferry.engine.ops.experts import FusedExperts, holds_experts
from kvferry.engine.ops.native import library
from kvferry.engine.ops.transform import ModuleRecord, replace

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "relu_squared": lambda x: nn.functional.relu(x) ** 2,
}


def fill(module: nn.Module) -> Any:
    torch.manual_seed(7)
    for parameter in module.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return module.eval().requires_grad_(False)


def qwen_experts(hidden: int = 64, middle: int = 48, experts: int = 8) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=middle, num_experts=experts, experts_implementation="eager"
    )
    return fill(Qwen3MoeExperts(config))


def gpt_oss_experts(limit: float) -> Any:
    config = GptOssConfig(
        hidden_size=64, intermediate_size=40, num_local_experts=4, swiglu_limit=limit, experts_implementation="eager"
    )
    return fill(GptOssExperts(config))


class Ungated(nn.Module):
    """Experts of one projection in and one out, as NemotronH has them."""

    def __init__(self, hidden: int, middle: int, experts: int) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts, FUNCTIONS["relu_squared"]
        self.up_proj = nn.Parameter(torch.empty(experts, middle, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, middle))

    def forward(self, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for token, place in itertools.product(range(len(hidden_states)), range(chosen.shape[1])):
            expert = chosen[token, place]
            middle = self.act_fn(self.up_proj[expert] @ hidden_states[token])
            out[token] += shares[token, place] * (self.down_proj[expert] @ middle)
        return out


def route(tokens: int, top_k: int, experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    shares, chosen = scores.topk(top_k, dim=-1)
    return chosen, shares


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def fused_like(module: Any, gate: str, limit: float = 0.0) -> FusedExperts:
    return next(x for x in FusedExperts.variants(module) if (x.gate, x.limit) == (gate, limit))


@both_dtypes
@pytest.mark.parametrize("gate", FUNCTIONS)
@pytest.mark.parametrize("tokens", [1, 2, 9, 300])
@pytest.mark.parametrize(("hidden", "middle"), [(64, 48), (72, 20), (600, 530)])
def test_they_are_the_experts(hidden: int, middle: int, tokens: int, gate: str, dtype: torch.dtype) -> None:
    module = qwen_experts(hidden, middle).to(dtype)
    x, (chosen, shares) = torch.randn(tokens, hidden).to(dtype), route(tokens, 3, 8)
    del module.act_fn
    module.act_fn = FUNCTIONS[gate]
    found = fused_like(module, gate)(x, chosen, shares.to(dtype))
    expected = module.double()(x.double(), chosen, shares.to(dtype).double())
    assert found.dtype == dtype
    assert distance(found, expected) < TOLERANCE[dtype]


@both_dtypes
@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_clamped_with_biases_transposed_and_interleaved(limit: float, dtype: torch.dtype) -> None:
    module = gpt_oss_experts(limit).to(dtype)
    x, (chosen, shares) = 20 * torch.randn(17, 64).to(dtype), route(17, 2, 4)
    found = fused_like(module, "swiglu", limit)(x, chosen, shares.to(dtype))
    expected = module.double()(x.double(), chosen, shares.to(dtype).double())
    assert distance(found, expected) < TOLERANCE[dtype]


def test_without_a_gate() -> None:
    module = fill(Ungated(64, 40, 4))
    x, (chosen, shares) = torch.randn(9, 64), route(9, 2, 4)
    assert distance(fused_like(module, "relu_squared")(x, chosen, shares), module(x, chosen, shares)) < 1e-5


@both_dtypes
def test_a_token_does_not_depend_on_the_tokens_beside_it(dtype: torch.dtype) -> None:
    fused = fused_like(qwen_experts(600, 530).to(dtype), "silu")
    x, (chosen, shares) = torch.randn(700, 600).to(dtype), route(700, 3, 8)
    whole = fused(x, chosen, shares)
    for rows in (slice(0, 1), slice(5, 18), slice(100, 700), torch.randperm(700), torch.tensor([3, 3, 699, 3])):
        assert torch.equal(fused(x[rows], chosen[rows], shares[rows]), whole[rows])


def test_threads_change_nothing() -> None:
    native = library()
    assert native is not None
    fused = fused_like(qwen_experts(128, 96), "silu")
    x, (chosen, shares) = torch.randn(90, 128), route(90, 3, 8)
    alone = fused(x, chosen, shares)
    native.set_threads(3)
    together = fused(x, chosen, shares)
    native.set_threads(torch.get_num_threads())
    assert torch.equal(alone, together)


def test_places_without_an_expert_count_for_nothing() -> None:
    fused = fused_like(qwen_experts(), "silu")
    x, (chosen, shares) = torch.randn(6, 64), route(6, 3, 8)
    fewer = fused(x, chosen[:, :2], shares[:, :2])
    for nobody in (8, -1, 2**40):
        chosen[:, 2] = nobody
        assert torch.equal(fused(x, chosen, shares), fewer)
    assert not fused(x, torch.full_like(chosen, 8), shares).any()
    assert fused(x[:0], chosen[:0], shares[:0]).shape == (0, 64)


def test_only_stacked_plain_weights_are_experts() -> None:
    module = qwen_experts()
    assert holds_experts(module)
    assert not holds_experts(nn.Linear(4, 4))
    module.post_expert_norm = nn.LayerNorm(64)
    assert not list(FusedExperts.variants(module))
    assert not list(FusedExperts.variants(qwen_experts().half()))


def test_routes_of_another_shape_are_refused() -> None:
    fused = fused_like(qwen_experts(), "silu")
    chosen, shares = route(4, 2, 8)
    with pytest.raises(ValueError, match="cannot route"):
        fused(torch.zeros(3, 64), chosen, shares)


class PassingOn(Qwen3MoeExperts):
    """Has numbers of experts without weights, which pass on their input, as LongcatFlash has."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        passes = top_k_index >= self.num_experts
        found = super().forward(hidden_states, top_k_index.clamp(max=self.num_experts - 1), top_k_weights * ~passes)
        return found + hidden_states * (top_k_weights * passes).sum(dim=-1, keepdim=True)


class OneOfThemOdd(Qwen3MoeExperts):
    """Its last expert computes something else."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        is_last = top_k_index == self.num_experts - 1
        return super().forward(hidden_states, top_k_index, torch.where(is_last, -top_k_weights, top_k_weights))


@pytest.mark.parametrize(("kind", "fits"), [(Qwen3MoeExperts, True), (PassingOn, False), (OneOfThemOdd, False)])
def test_every_expert_is_tried_before_they_are_replaced(kind: type[nn.Module], fits: bool) -> None:
    module = qwen_experts()
    module.__class__ = kind
    x, (chosen, shares) = torch.randn(5, 64), route(5, 2, 7)  # none of them goes to the last one
    found = ModuleRecord((x, chosen, shares), {}, module(x, chosen, shares))
    assert replace(module, found, Workspace()) is fits
    assert isinstance(module.forward, FusedExperts) is fits
