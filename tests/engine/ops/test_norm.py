from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvferry.engine.ops.native import library
from kvferry.engine.ops.norm import FusedRMSNorm

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")

FORMS = {LlamaRMSNorm: 0, Olmo2RMSNorm: 1, Gemma3RMSNorm: 2}
"""Which variant each family's norm is."""


def make_norm(kind: type[nn.Module], size: int, dtype: torch.dtype) -> nn.Module:
    norm = kind(size, eps=1e-3)
    nn.init.normal_(norm.weight, mean=0.5)
    return norm.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", [16, 768, 77])
def test_it_is_the_family_s_norm(size: int, kind: type[nn.Module], dtype: torch.dtype) -> None:
    norm = make_norm(kind, size, dtype)
    fused = list(FusedRMSNorm.variants(norm))[FORMS[kind]]
    for scale in (1e-3, 1.0, 50.0):
        x = (scale * torch.randn(1, 5, size)).to(dtype)
        torch.testing.assert_close(fused(x), norm(x), rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6)


def test_any_shape_and_stride_is_taken() -> None:
    norm = make_norm(LlamaRMSNorm, 16, torch.float32)
    fused = next(FusedRMSNorm.variants(norm))
    wide = torch.randn(1, 6, 5, 32)
    for x in (wide[:, :, 1:4, :16], wide[..., ::2], wide[0, 0, :, :16], wide[0, :, 0, 16:], wide[0, 0, 0, :16]):
        torch.testing.assert_close(fused(x), norm(x))
    many = torch.randn(2, 3, 4, 16).transpose(1, 2)
    torch.testing.assert_close(fused(many), norm(many))


def test_what_is_no_norm_has_no_variants() -> None:
    assert list(FusedRMSNorm.variants(nn.Linear(3, 3))) == []
    assert list(FusedRMSNorm.variants(LlamaRMSNorm(8).half())) == []
