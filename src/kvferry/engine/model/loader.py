"""Loads a model from disk or from Hugging Face's hub, and refuses models that would not run exactly."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from kvferry.core.blocks.layout import LayerLayout
from kvferry.core.errors import ConfigError, KvferryError, UnsupportedModel
from kvferry.core.sampling import SAMPLING_DEFAULTS
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.attention import ATTENTION_NAME, probe_layers, register_attention
from kvferry.engine.model.batch_invariance import arithmetic_of
from kvferry.engine.model.checkpoint import (
    require_cache_fits,
    require_complete,
    require_divisible,
    require_sound,
    require_supported,
)
from kvferry.engine.model.patch import make_patch
from kvferry.engine.model.patching import apply_patches
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.model.rope import install_rope, trained_context
from kvferry.engine.model.self_check import SelfCheck
from kvferry.engine.patch_names import DEFAULT_PATCHES
from kvferry.models.catalog import resolve
from kvferry.models.checkpoint import CheckpointFiles, checkpoint_name, local_checkpoint, resolved_config

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a description of the work and the finished share, 0 to 1."""

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run on this rank. `fingerprint`: names the checkpoint and dtype, see `models.checkpoint`;
    `max_position`: the model's own limit in tokens; `default_sampling`: the checkpoint's sampling parameters, for
    requests without their own."""

    module: nn.Module
    tokenizer: Any
    layers: tuple[LayerLayout, ...]
    windows: tuple[int | None, ...]
    """Each layer's sliding window in tokens, the token itself included; None: full attention."""
    trained_context: int | None
    """Sequences of more tokens are computed with other rotary factors (`rope`); None: there is no such limit."""
    fingerprint: str
    dtype: str
    device: torch.device
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    default_sampling: dict[str, float | int]
    batch_dependence: str = ""
    """The reason why the rows of a step may depend on each other in their last bits; empty if they do not."""
    kernels: str = ""
    """The name of the kernels (`batch_invariance.Arithmetic`)."""


@dataclass(frozen=True)
class ModelSettings:
    """A checkpoint's configuration, read before any weight: `values` is transformers' config object."""

    source: Path | str
    values: Any
    model_class: type[Any]

    @property
    def quantized(self) -> bool:
        """True if the configuration describes quantized weights."""
        return getattr(self.values, "quantization_config", None) is not None


def read_settings(config: EngineConfig, placement: RankPlacement) -> ModelSettings:
    """Read the configuration. Raises `ConfigError` if that is impossible, `UnsupportedModel` if the model cannot
    run."""
    source = resolve(config.model)
    with _reading(config.model):
        values = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        model_class = _model_class(values, config)
    require_supported(values, model_class)
    _require_length(config.max_model_len, values.get_text_config().max_position_embeddings)
    require_divisible(values, model_class, placement.size)
    return ModelSettings(source, values, model_class)


def _require_length(max_model_len: int | None, limit: int) -> None:
    if limit < 2:
        raise UnsupportedModel(f"max_position_embeddings in config.json is {limit}, which leaves no room for an answer")
    if max_model_len is not None and not 2 <= max_model_len <= limit:
        raise ConfigError(f"--max-model-len {max_model_len} is not between 2 and the model's own limit, {limit}")


def load_model(
    config: EngineConfig, placement: RankPlacement | None = None, on_progress: Progress = lambda phase, share: None
) -> LoadedModel:
    """Load the weights (this rank's share of them), tokenizer and settings. Minutes for large models. All ranks call it
    together.

    Raises `ConfigError` if the checkpoint cannot be read, `UnsupportedModel` if the model would not run exactly.
    """
    placement = placement or RankPlacement()
    device = placement.choose_device(config.device)
    with _reading(config.model):
        before = CheckpointFiles.of(str(resolve(config.model)))
    settings = read_settings(config, placement)
    if isinstance(settings.source, Path):
        require_sound(settings.source, quantized=settings.quantized)
    options = {"trust_remote_code": config.trust_remote_code}
    # All other errors come before the weights, which may take minutes.
    require_cache_fits(config, settings.values, device)
    for name in config.model_patch or DEFAULT_PATCHES:
        make_patch(name)
    with _reading(config.model):
        tokenizer = AutoTokenizer.from_pretrained(settings.source, **options)
        register_attention()
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        with _weights_progress(on_progress):
            module, weights = AutoModelForCausalLM.from_pretrained(
                settings.source,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `require_complete` names them
                **options,
                **placement.load_options(),
            )
            require_complete(weights, config.model)
            if not isinstance(settings.source, Path) and (folder := local_checkpoint(settings.source)) is not None:
                require_sound(folder, quantized=settings.quantized)
    module = module.to(device).eval().requires_grad_(False)
    _own_memory(module)
    on_progress("checking the model", 1.0)
    border = trained_context(settings.values)
    with _running(module):
        install_rope(module, border)
        probed = probe_layers(module, device, placement)
        check = SelfCheck(module, probed, device, border)
        check.run()
    on_progress("patching the model", 1.0)
    apply_patches(module, config.model_patch or DEFAULT_PATCHES)
    with _running(module):
        check.run_patched()
        arithmetic = arithmetic_of(module, probed, device)
    _log_batch_dependence(arithmetic.dependence, config.batch_invariant)
    dtype_name = str(next(module.parameters()).dtype).removeprefix("torch.")
    text = settings.values.get_text_config()
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        layers=probed.layouts,
        windows=probed.windows,
        trained_context=border,
        fingerprint=_name_of(settings.source, before, module.config, dtype_name, on_progress),
        dtype=dtype_name,
        device=device,
        vocab_size=text.vocab_size,
        max_position=text.max_position_embeddings,
        eos_token_ids=frozenset(
            token_id for token_id in _eos_token_ids(module, tokenizer) if 0 <= token_id < text.vocab_size
        ),
        default_sampling=_default_sampling(module),
        batch_dependence=arithmetic.dependence,
        kernels=placement.shared_name(arithmetic.name, device),
    )


def _log_batch_dependence(reason: str, is_batch_invariant: bool) -> None:
    if reason and is_batch_invariant:
        logger.warning("every token is computed by itself, so that answers do not depend on other requests: %s", reason)
    elif reason:
        logger.info("answers may depend on other requests, by rounding (%s); --batch-invariant prevents that", reason)


def _name_of(source: Path | str, before: CheckpointFiles, config: Any, dtype: str, on_progress: Progress) -> str:
    """The fingerprint, which is the same for all instances with these weights and this configuration in this dtype.
    Raises `ConfigError` if the files have changed since `before`."""
    with _reading(str(source)):
        return checkpoint_name(
            source,
            config=resolved_config(config),
            dtype=dtype,
            before=before,
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
    """Raise errors of reading a checkpoint as `ConfigError`."""
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
    """Raise errors of first running a model as `UnsupportedModel`."""
    try:
        yield
    except KvferryError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(module).__name__} fails when it computes a few tokens: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def _weights_progress(on_progress: Progress) -> Iterator[None]:
    """Report transformers' own progress bar to `on_progress`."""
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
    """The part of a progress bar's interface that transformers uses."""

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
    token_ids: set[int] = set()
    generation = getattr(module, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(module.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if value is not None:
            token_ids.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(token_ids)


def _default_sampling(module: Any) -> dict[str, float | int]:
    """The sampling parameters that the checkpoint recommends."""
    values = module.generation_config.to_diff_dict() if module.generation_config is not None else {}
    return {name: values[name] for name in SAMPLING_DEFAULTS if values.get(name) is not None}


class MappedFiles:
    """The ranges of this process's memory that are mapped from files. Where the system does not list them (only Linux
    does), all memory counts as mapped."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.paths: set[str] = set()
        self._is_listed = _MAPS.is_file()
        for line in _MAPS.read_text().splitlines() if self._is_listed else ():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):  # others are "[heap]" and the like
                start, _, end = fields[0].partition("-")
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))
                self.paths.add(fields[5])

    def __contains__(self, address: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        return not self._is_listed or (index >= 0 and address < self._ends[index])


def _own_memory(module: nn.Module) -> None:
    """Copy all parameters and buffers in host memory that are mapped from files into memory of this process. Shared
    tensors stay shared.

    safetensors and PyTorch map a checkpoint's files into memory. A mapped weight follows its file: overwriting the file
    in place changes the answers, and truncating it ends the process (SIGBUS).
    """
    mapped = MappedFiles()
    copies: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], Tensor] = {}
    for tensor in _own_tensors(module):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.data_ptr() in mapped:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in copies:
                copies[key] = tensor.detach().clone()
            tensor.data = copies[key]


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Every parameter and buffer with memory of its own; for sharded ones, this rank's shard."""
    for tensor in [*module.parameters(), *module.buffers()]:
        with torch.no_grad():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if type(local) in (Tensor, nn.Parameter):
            yield local
