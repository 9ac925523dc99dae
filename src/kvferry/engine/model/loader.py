"""Brings a model from disk (or the hub) to where it runs, and refuses what would not run exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from kvferry.core.errors import ConfigError, KvferryError, UnsupportedModel
from kvferry.core.layout import LayerLayout
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.attention import ATTENTION_NAME, probe_layers, register_attention
from kvferry.engine.model.checkpoint import require_complete
from kvferry.engine.model.company import company_matters
from kvferry.engine.model.patch_names import DEFAULT_PATCHES
from kvferry.engine.model.patching import apply_patches
from kvferry.engine.model.place import Place
from kvferry.engine.model.rope import install_rope, trained_context
from kvferry.engine.model.self_check import self_check
from kvferry.engine.model.stored import require_sound
from kvferry.engine.model.support import require_divisible, require_supported
from kvferry.models.catalog import resolve
from kvferry.models.checkpoint import checkpoint_name, checkpoint_place

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""(what is going on, share done in [0, 1])."""

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what was found out about it."""

    module: nn.Module
    tokenizer: Any
    layers: tuple[LayerLayout, ...]
    windows: tuple[int | None, ...]
    """Of each layer, the token itself included; None: it sees all that came before."""
    trained_context: int | None
    """A sequence of more tokens is computed with other rotary factors (`rope`); None: there is no such border."""
    fingerprint: str
    dtype: str
    device: torch.device
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    default_sampling: dict[str, float | int]
    company: str = ""
    """Why rows of a step may depend on each other in their last bits; empty: they do not."""


@dataclass(frozen=True)
class ModelSettings:
    """What a checkpoint says about itself, read before any weight."""

    source: Path | str
    values: Any
    model_class: type[Any]

    @property
    def quantized(self) -> bool:
        """Whether it says what weights that are no floating-point numbers mean."""
        return getattr(self.values, "quantization_config", None) is not None


def read_settings(config: EngineConfig, place: Place) -> ModelSettings:
    """Raises `ConfigError` when the checkpoint cannot be read, `UnsupportedModel` when it will not run here."""
    source = resolve(config.model)
    with _reading(config.model):
        values = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        model_class = _model_class(values, config)
    require_supported(values, model_class)
    _require_length(config.max_model_len, values.get_text_config().max_position_embeddings)
    require_divisible(values, model_class, place.size)
    return ModelSettings(source, values, model_class)


def _require_length(wanted: int | None, limit: int) -> None:
    if limit < 2:
        raise UnsupportedModel(f"max_position_embeddings in config.json is {limit}: no token of an answer has a place")
    if wanted is not None and not 2 <= wanted <= limit:
        raise ConfigError(f"--max-model-len {wanted} is not between 2 and the model's own limit, {limit}")


def load_model(
    config: EngineConfig, place: Place | None = None, on_progress: Progress = lambda what, share: None
) -> LoadedModel:
    """Load weights (this place's share of them), tokenizer and settings; all ranks call it together.

    Raises `ConfigError` when the checkpoint cannot be read, `UnsupportedModel` when it would not run exactly.
    """
    place = place or Place()
    device = place.choose_device(config.device)
    found = read_settings(config, place)
    if isinstance(found.source, Path):
        require_sound(found.source, quantized=found.quantized)
    options = {"trust_remote_code": config.trust_remote_code}
    with _reading(config.model):
        register_attention()
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        with _weights_progress(on_progress):
            module, weights = AutoModelForCausalLM.from_pretrained(
                found.source,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `require_complete` names them
                **options,
                **place.load_options(),
            )
            require_complete(weights, config.model)
            if not isinstance(found.source, Path) and (folder := checkpoint_place(found.source)) is not None:
                require_sound(folder, quantized=found.quantized)
        tokenizer = AutoTokenizer.from_pretrained(found.source, **options)
    module = module.to(device).eval().requires_grad_(False)
    on_progress("checking the model", 1.0)
    border = trained_context(found.values)
    with _running(module):
        install_rope(module, border)
        probed = probe_layers(module, device, place)
        self_check(module, probed, device, border)
    on_progress("patching the model", 1.0)
    apply_patches(module, config.model_patch or DEFAULT_PATCHES)
    with _running(module):
        company = company_matters(module, probed, device)
    _tell_company(company, config.batch_invariant)
    dtype_name = str(next(module.parameters()).dtype).removeprefix("torch.")
    text = found.values.get_text_config()
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        layers=probed.layouts,
        windows=probed.windows,
        trained_context=border,
        fingerprint=_name_of(found.source, dtype_name, on_progress),
        dtype=dtype_name,
        device=device,
        vocab_size=text.vocab_size,
        max_position=text.max_position_embeddings,
        eos_token_ids=_eos_token_ids(module, tokenizer),
        default_sampling=_default_sampling(module),
        company=company,
    )


def _tell_company(company: str, is_asked_for: bool) -> None:
    if company and is_asked_for:
        logger.warning("every token is computed by itself, for answers that depend on nothing else: %s", company)
    elif company:
        logger.info("answers may depend on what else is asked, by rounding (%s); --batch-invariant forbids it", company)


def _name_of(source: Path | str, dtype: str, on_progress: Progress) -> str:
    """The same on every instance that serves these weights in this number format, of vLLM's too."""
    with _reading(str(source)):
        return checkpoint_name(
            source,
            dtype=dtype,
            on_progress=lambda done, total: on_progress("naming the checkpoint by its content", done / max(total, 1)),
        )


def _model_class(settings: Any, config: EngineConfig) -> type[Any]:
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    except KeyError:
        if config.trust_remote_code and "AutoModelForCausalLM" in getattr(settings, "auto_map", {}):
            return AutoModelForCausalLM
        raise UnsupportedModel(f"{settings.model_type} is not a causal language model in transformers") from None


@contextmanager
def _reading(model: str) -> Iterator[None]:
    """Translate what goes wrong while a checkpoint is read."""
    try:
        yield
    except KvferryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot load the model {model!r}: {_first_line(error)}. Give a directory with config.json, tokenizer and"
            " safetensors, a Hugging Face id, or kvferry/tiny-python"
        ) from error


@contextmanager
def _running(module: nn.Module) -> Iterator[None]:
    """Translate what goes wrong while a model is first run."""
    try:
        yield
    except KvferryError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(module).__name__} does not run through kvferry's attention: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def _weights_progress(on_progress: Progress) -> Iterator[None]:
    """Pass transformers' own progress bar on to `on_progress`."""
    on_progress("loading weights", 0.0)

    def hook(factory: Any, args: Any, kwargs: Any) -> Any:
        return _Reporting(args[0] if args else kwargs.get("iterable", ()), on_progress)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
        on_progress("loading weights", 1.0)


class _Reporting:
    """The part of a progress bar that transformers uses."""

    def __init__(self, items: Any, on_progress: Progress) -> None:
        self._items, self._on_progress = items, on_progress

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items) if hasattr(self._items, "__len__") else 0
        for index, item in enumerate(self._items):
            yield item
            if total:
                self._on_progress("loading weights", (index + 1) / total)

    def __enter__(self) -> _Reporting:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def update(self, count: int = 1) -> None:
        """Ignored: the iteration itself is reported."""

    def close(self) -> None:
        """Nothing to close."""

    def set_description(self, *text: object, **options: object) -> None:
        """Ignored."""

    def set_postfix(self, *text: object, **options: object) -> None:
        """Ignored."""


def _eos_token_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(module, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(module.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(found)


def _default_sampling(module: Any) -> dict[str, float | int]:
    """What the checkpoint recommends where a request is silent."""
    given = module.generation_config.to_diff_dict() if module.generation_config is not None else {}
    return {name: given[name] for name in _SAMPLING_DEFAULTS if given.get(name) is not None}
