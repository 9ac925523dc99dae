"""What would answer wrongly far out, in a batch or in chunks does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvferry.core.errors import UnsupportedModel
from kvferry.engine.config import EngineConfig
from kvferry.engine.model import loader, self_check
from kvferry.engine.model.loader import load_model
from kvferry.models.random_model import make_random_model
from support.families import OPTIONS, make_model


def load(folder: Path) -> Any:
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Each model that is loaded from now on has its layers' inputs changed: hidden states and positions go in."""
    real = loader.install_rope

    def install(module: Any, border: int | None) -> None:
        real(module, border)
        for layer in module.model.layers:
            layer.register_forward_pre_hook(change, with_kwargs=True)

    monkeypatch.setattr(loader, "install_rope", install)


def by_company(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As a mixer of neighbours would: rows see the one before, whosever it is."""
    hidden = args[0]
    return (hidden + 0.5 * hidden.roll(1, dims=1), *args[1:]), kwargs


def by_longest(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As a scale that follows the largest position of the batch would."""
    return (args[0] * (1.0 + (kwargs["position_ids"].max() > 2000)), *args[1:]), kwargs


@pytest.mark.parametrize("change", [by_company, by_longest])
def test_what_depends_on_company_is_refused(change: Any, model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_maker("llama")
    load(folder)
    spoil(monkeypatch, change)
    with pytest.raises(UnsupportedModel, match=r"does not give the same logits|other logits with its own cache"):
        load(folder)


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_longrope_by_the_batch_is_refused(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the rotary embedding left as transformers has it, the model would not start."""
    case = next(one for one in OPTIONS if one.family == family and "longrope (" in one.option)
    make_model(case, tmp_path)
    load(tmp_path)
    monkeypatch.setattr(loader, "install_rope", lambda module, border: None)
    with pytest.raises(UnsupportedModel, match="does not give the same logits"):
        load(tmp_path)


def test_a_family_whose_code_fails_is_refused_in_one_line(model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AttributeError("no such thing\nand more")

    spoil(monkeypatch, fail)
    with pytest.raises(UnsupportedModel, match=r"AttributeError: no such thing$"):
        load(model_maker("llama"))


@pytest.mark.parametrize("family", ["bert", "ernie", "data2vec-text", "roc_bert"])
def test_encoders_are_told_what_makes_them_causal(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    make_random_model(tmp_path / "encoder", family, **sizes, is_decoder=False)
    with pytest.raises(UnsupportedModel, match=r'is not causal: .* does not have "is_decoder": true'):
        load(tmp_path / "encoder")
    make_random_model(tmp_path / "decoder", family, **sizes, is_decoder=True)
    load(tmp_path / "decoder")


def test_a_failure_of_the_models_own_cache_is_not_taken_for_one_of_the_model(
    model_maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None:
            raise RuntimeError("no room")

    spoil(monkeypatch, fail)
    with pytest.raises(UnsupportedModel, match=r"fails with transformers' own cache.*\(RuntimeError: no room\)"):
        load(model_maker("llama"))


def test_every_length_that_a_configuration_names_is_passed(model_maker: Any) -> None:
    text = load(model_maker("mistral", sliding_window=100, max_position_embeddings=3000)).module.config
    assert self_check.thresholds(text) == [100, 3000]
    examples = self_check._examples(text, torch.device("cpu"))
    assert [example.first for example in examples] == [0, 0, 76, 88, 2976]


def test_lengths_may_be_in_lists_and_written_as_fractions(model_maker: Any) -> None:
    text = load(model_maker("llama", max_position_embeddings=3000)).module.config
    text.layer_windows, text.rope_parameters["original_max_position_embeddings"] = [128, 700], 900.0
    text.position_scale, text.context_share = float("inf"), [float("nan"), 0.5]
    assert self_check.thresholds(text) == [128, 700, 900, 3000]
    text.layer_windows = list(range(2999))
    assert self_check.thresholds(text, max_lengths=32) == [*range(25, 25 + 32), 3000]


def of_cached_tokens(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As a cache that forgets what the mask still shows would: only the values of the last 20 tokens are kept."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the name before transformers 5.24
    for layer in [] if cache is None else cache.layers:
        if layer.is_initialized:
            layer.values[:, :, :-20] = 0
    return args, kwargs


def test_a_cache_that_forgets_is_refused(model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then `generate()` has other answers than a forward pass, and neither is the right one."""
    spoil(monkeypatch, of_cached_tokens)
    with pytest.raises(UnsupportedModel, match="other logits with its own cache than without"):
        load(model_maker("llama"))


def test_a_mask_that_comes_only_in_long_steps_is_refused(model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of two tokens does not see it."""

    def mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        length, own = args[0].shape[1], kwargs["attention_mask"] is None
        return args, kwargs | ({"attention_mask": torch.zeros(1, 1, length, length)} if own and length > 2 else {})

    spoil(monkeypatch, mask)
    with pytest.raises(UnsupportedModel, match="an attention mask of its own in some steps only"):
        load(model_maker("llama"))


def rarely(module: nn.Module) -> Any:
    """A replacement that is right for the tokens that it is tried with, and not for all."""
    forward = module.forward
    return lambda x: forward(x) * (1 + (x[..., :1] > 2.5))


def test_a_replacement_that_fits_few_tokens_only_is_refused(model_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check is not made with the tokens with which replacements are tried."""
    real = loader.apply_patches

    def apply(module: Any, names: Any) -> None:
        real(module, names)
        module.model.norm.forward = rarely(module.model.norm)

    monkeypatch.setattr(loader, "apply_patches", apply)
    with pytest.raises(UnsupportedModel, match="does not give the same logits when it is patched"):
        load(model_maker("llama"))
