"""Patches of models: they go by name, and what changes a model's answers is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvferry.core.errors import ConfigError, UnknownName, UnsupportedModel
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.cpu_kernels import CpuKernels
from kvferry.engine.model.patch import ModelPatch, make_patch
from kvferry.engine.model.patching import apply_patches
from kvferry.engine.ops.native import library
from kvferry.engine.patch_names import MODEL_PATCHES
from kvferry.models.random_model import make_random_model
from kvferry.testing.model_patch import ModelPatchContract

HERE = __name__


@pytest.mark.skipif(library() is None, reason="no compiler here")
class TestCpuKernels(ModelPatchContract):
    patch = "cpu_kernels"
    fits = ("llama", "qwen3", "gemma2", "qwen3_moe")


class ScaleOptions(msgspec.Struct, frozen=True):
    by: float = 1.05


class ScaledNorms(ModelPatch):
    """Wrong by a little: each norm's weight is scaled."""

    options_type = ScaleOptions
    options: ScaleOptions

    def apply(self, model: nn.Module) -> int:
        norms: list[Any] = [one for one in model.modules() if type(one).__name__.endswith("RMSNorm")]
        for norm in norms:
            norm.weight.mul_(self.options.by)
        return len(norms)


class OtherKeys(ModelPatch):
    """Wrong where no logits tell: only the keys are others."""

    def apply(self, model: nn.Module) -> int:
        layers: list[Any] = [one for name, one in model.named_modules() if name.endswith("k_proj")]
        for layer in layers:
            layer.weight.neg_()
        return len(layers)


class Raises(ModelPatch):
    def apply(self, model: nn.Module) -> int:
        raise KeyError("no such layer")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def model(llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval().requires_grad_(False)


def test_a_patch_that_changes_answers_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"ScaledNorms changes the .* of layer 0 by"):
        apply_patches(model, [f"{HERE}:ScaledNorms"])


def test_a_patch_that_changes_keys_only_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="changes the keys of layer 0"):
        apply_patches(model, [f"{HERE}:OtherKeys"])


def test_a_patch_that_fails_names_itself(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="Raises failed on LlamaForCausalLM: KeyError"):
        apply_patches(model, [f"{HERE}:Raises"])


def test_options_are_typed_and_a_harmless_value_passes(model: Any) -> None:
    assert make_patch(f"{HERE}:ScaledNorms?by=2").options == ScaleOptions(by=2.0)
    apply_patches(model, [f"{HERE}:ScaledNorms?by=1.0"])
    with pytest.raises(ConfigError, match="did you mean 'by'"):
        make_patch(f"{HERE}:ScaledNorms?bye=2")
    with pytest.raises(ConfigError, match="by"):
        make_patch(f"{HERE}:ScaledNorms?by=much")


def test_names_are_checked_with_the_settings() -> None:
    assert isinstance(make_patch("cpu_kernels"), CpuKernels)
    assert "cpu_kernels" in MODEL_PATCHES.names()
    EngineConfig(model="m", model_patch=("my_package:Patch?x=1", "cpu_kernels"))
    with pytest.raises(UnknownName, match="did you mean 'cpu_kernels'"):
        EngineConfig(model="m", model_patch=("cpu_kernel",))
    with pytest.raises(ConfigError, match=r"\?name=value"):
        EngineConfig(model="m", model_patch=("cpu_kernels?fast",))
    with pytest.raises(ConfigError, match="twice"):
        EngineConfig(model="m", model_patch=("cpu_kernels?a=1&a=2",))
    with pytest.raises(ConfigError, match="must be a kvferry ModelPatch"):
        make_patch(f"{HERE}:ScaleOptions")
