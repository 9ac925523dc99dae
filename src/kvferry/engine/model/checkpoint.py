"""Checks of a checkpoint. Before any weight is loaded: whether its architecture runs exactly and can be split among
ranks, whether its KV cache fits, and whether its files are sound. After that: whether it has exactly the weights of its
model.

transformers silently takes one of two tensors with the same name, converts integers that another library has packed to
floating point, and ignores a `generation_config.json` that it cannot read. It initializes missing weights at random and
ignores unknown ones, with a warning. A server would then give wrong answers, so all of this is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from kvferry.core.blocks.layout import DTYPE_BYTES, KVLayout, LayerLayout
from kvferry.core.errors import ConfigError, InvalidRequest, UnsupportedModel
from kvferry.core.host.machine import require_memory
from kvferry.core.sampling import SAMPLING_DEFAULTS, SamplingParams
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.blocks.kv_cache import require_two_blocks
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.attention import ATTENTION_NAME, ProbeContext, attention_context, register_attention

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_FLOATS = ("F", "BF")
"""Prefixes of the names of floating-point dtypes; all others are integers, booleans and complex numbers."""

_HEAD_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value"})
"""Linear layers whose outputs are heads, concatenated."""

_MIN_WINDOW = 2
"""Tokens of the smallest sliding window, the token itself included."""

_EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def require_supported(config: Any, model_class: type[Any]) -> None:
    """Raise `UnsupportedModel` with the reason, before any weight is loaded.

    The numeric self-check of the loaded model (`self_check`) finds all other differences.
    """
    name = f"{model_class.__name__} ({config.model_type})"
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not call attention through transformers' attention interface")
    text = config.get_text_config()
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        raise UnsupportedModel(f"{name} does not say how long a sequence may be (max_position_embeddings)")
    types = set(getattr(text, "layer_types", None) or ())
    if not types <= _EXACT_LAYER_TYPES:
        others = ", ".join(sorted(types - _EXACT_LAYER_TYPES))
        raise UnsupportedModel(f"{name} has layers of type {others}; only full and sliding attention run exactly here")
    if getattr(text, "attention_chunk_size", None) and "sliding_attention" not in types and not types:
        raise UnsupportedModel(f"{name} uses chunked attention, which exists only in its attention mask")
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; kvferry serves decoder-only models")
    _require_window(text, name)


def _require_window(text: Any, name: str) -> None:
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    has_window = "sliding_attention" in types if types else getattr(text, "use_sliding_window", True)
    if isinstance(window, int) and window < _MIN_WINDOW and has_window:
        raise UnsupportedModel(
            f"{name} has sliding_window {window} in config.json; a window is of {_MIN_WINDOW} tokens or more, because"
            " the model's own cache, with which kvferry's is compared, fails with fewer"
        )


def require_divisible(config: Any, model_class: type[Any], num_ranks: int) -> None:
    """Raise `UnsupportedModel`, with the numbers, unless transformers can split the model among `num_ranks` ranks."""
    if num_ranks == 1:
        return
    name = f"{model_class.__name__} ({config.model_type})"
    plan = _tensor_parallel_plan(config, model_class)
    if not plan:
        raise UnsupportedModel(f"{name} has no tensor-parallel plan in transformers; use --tensor-parallel-size 1")
    if not any(rule.rsplit(".", 1)[-1] in _HEAD_PROJECTIONS and plan[rule] == "colwise" for rule in plan):
        return  # every rank keeps all heads
    text = config.get_text_config()
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if any(count % num_ranks for count in (*_as_list(heads), *_as_list(kv_heads))):
        raise UnsupportedModel(
            f"{name} has {heads} attention heads and {kv_heads} KV heads, which {num_ranks} ranks cannot share evenly;"
            " use a --tensor-parallel-size that divides both"
        )


def _tensor_parallel_plan(config: Any, model_class: type[Any]) -> dict[str, str]:
    """transformers' rules for this architecture, by module name."""
    sources = (getattr(config.get_text_config(), "base_model_tp_plan", None), getattr(model_class, "_tp_plan", None))
    return {rule: style for plan in sources for rule, style in (plan or {}).items()}


def _as_list(count: int | list[int]) -> list[int]:
    return [count] if isinstance(count, int) else list(count)


def require_cache_fits(config: EngineConfig, values: Any, device: torch.device) -> None:
    """Raise `ConfigError` if --kv-cache-memory is too little for the model, or more than the machine has. `values`: the
    checkpoint's configuration. Errors that need the weights are raised when the cache is allocated."""
    if config.kv_cache_memory is None:
        return
    num_bytes = parse_bytes(config.kv_cache_memory, "--kv-cache-memory")
    if device.type == "cpu":
        require_memory(num_bytes, f"--kv-cache-memory {config.kv_cache_memory}")
    dtype = getattr(values, "dtype", None) if config.dtype == "auto" else config.dtype
    name = str(dtype or torch.float32).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        return
    layers = tuple(kv_layers(values, trust_remote_code=config.trust_remote_code))
    require_two_blocks(
        KVLayout(model_fingerprint="", dtype=name, block_size=config.block_size, layers=layers), num_bytes
    )


def kv_layers(values: Any, *, trust_remote_code: bool) -> list[LayerLayout]:
    """Each layer's KV on a single rank. If the model does not run without its weights, the layers up to that point: a
    lower bound."""
    register_attention()
    context = ProbeContext()
    # Errors recur when the model is loaded. bfloat16, because some experts compute in nothing else.
    with suppress(Exception), torch.device("meta"), torch.inference_mode(), attention_context(context):
        options = {"attn_implementation": ATTENTION_NAME, "dtype": torch.bfloat16}
        # Passed in both cases: transformers would prompt at the terminal without it.
        module = AutoModelForCausalLM.from_config(values, trust_remote_code=trust_remote_code, **options)
        module(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return [context.layers[layer] for layer in sorted(context.layers)]


def require_sound(folder: Path, *, quantized: bool) -> None:
    """Raise `ConfigError` if the files contradict each other or the configuration. `quantized`: the configuration
    describes quantized weights. Weights in other files than safetensors are not checked."""
    _require_generation_config(folder / _GENERATION)
    file_of: dict[str, str] = {}
    for name in _files(folder):
        for tensor, number_format in _stored_formats(folder / name):
            if tensor in file_of and not _holds_same(tensor, folder / file_of[tensor], folder / name):
                raise ConfigError(
                    f"{tensor} is in {file_of[tensor]} and in {name} of {str(folder)!r}, with other values; delete the"
                    " file that is not of this checkpoint"
                )
            if tensor.endswith("weight") and not quantized and not number_format.startswith(_FLOATS):
                raise ConfigError(
                    f"{tensor} in {name} of {str(folder)!r} is stored as {number_format}, and config.json has no"
                    " quantization_config that says what this means; give a checkpoint in floating point"
                )
            file_of[tensor] = name


def _require_generation_config(path: Path) -> None:
    """Raise `ConfigError` if there is a `generation_config.json` that cannot be read: it has the tokens that end
    answers."""
    if not path.is_file():
        return
    try:
        config: Any = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise TypeError(f"an object is expected, not a {type(config).__name__}")
        _require_generation_values(config)
    except (ValueError, TypeError, RecursionError, InvalidRequest) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; copy it again, or delete it") from error


def _require_generation_values(config: dict[str, Any]) -> None:
    """Raise `ValueError` or `InvalidRequest` unless the sampling defaults and `eos_token_id` are valid."""
    sampling = {name: config[name] for name in SAMPLING_DEFAULTS if config.get(name) is not None}
    msgspec.convert(sampling, SamplingParams).validate()
    try:
        msgspec.convert(config.get("eos_token_id"), int | list[int] | None)
    except msgspec.ValidationError as error:
        raise ValueError(f"eos_token_id: {error}") from error


def _files(folder: Path) -> list[str]:
    """The safetensors files that transformers reads."""
    if (folder / _WHOLE).is_file():
        return [_WHOLE]
    index = folder / _INDEX
    if not index.is_file():
        return []
    names = sorted(set(_weight_map(index).values()))
    lost = [name for name in names if "/" in name or not (folder / name).is_file()]
    if lost:
        raise ConfigError(
            f"{str(index)!r} names {lost[0]!r}, which is not in the same directory; copy all of the checkpoint's files"
        )
    return names


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("a file's name is text")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{str(index)!r} does not say which weights are in which file: {error!r}") from error
    return dict(weight_map)


def _stored_formats(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            yield from [(name, str(file.get_slice(name).get_dtype())) for name in file.keys()]  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(path):
            raise ConfigError(
                f"{str(path)!r} is a Git LFS pointer and not the weights; run `git lfs pull` in its directory"
            ) from error
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; copy or download it again") from error


def _is_lfs_pointer(path: Path) -> bool:
    """True if a clone without Git LFS has left a short text in place of the file."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False


def _holds_same(tensor: str, left_path: Path, right_path: Path) -> bool:
    with safe_open(left_path, framework="pt") as left, safe_open(right_path, framework="pt") as right:
        return bool(torch.equal(left.get_tensor(tensor), right.get_tensor(tensor)))


def require_complete(loading_info: Mapping[str, Any], model: str) -> None:
    """Raise `ConfigError` that names the problems of the weights of `model`. `loading_info`: transformers' own.

    Tied weights that are stored once, and buffers that the architecture declares as not stored, are not missing.
    """
    problems = [
        _misshapen(loading_info.get("mismatched_keys", ()), model),
        _named(loading_info.get("missing_keys", ()), f"missing from {model!r}"),
        _named(
            loading_info.get("unexpected_keys", ()), f"in {model!r}, but its config.json describes a model without them"
        ),
        "; ".join(str(message).split("\n")[0] for message in loading_info.get("error_msgs", ())),
    ]
    wrong = [problem for problem in problems if problem]
    if wrong:
        raise ConfigError(
            f"the weights do not belong to this model: {'; '.join(wrong).rstrip('.')}. Give the checkpoint's own"
            " config.json and all of its safetensors files"
        )


def _named(names: Collection[str], noun: str) -> str:
    """One of the names, the number of others, and their problem; empty if there are no names."""
    if not names:
        return ""
    # the shortest first: of "a.weight" and "a.weight_scale_inv" the former says more
    first, others = min(names, key=lambda name: (len(name), name)), len(names) - 1
    return f"{first}{_and_others(others)} {'are' if others else 'is'} {noun}"


def _and_others(count: int) -> str:
    return "" if count == 0 else f" and {count} other{'s' if count > 1 else ''}"


def _misshapen(mismatches: Collection[tuple[str, Any, Any]], model: str) -> str:
    if not mismatches:
        return ""
    name, stored, expected = min(mismatches, key=lambda entry: entry[0])
    have = "have other shapes" if len(mismatches) > 1 else "has another shape"
    return (
        f"{name}{_and_others(len(mismatches) - 1)} in {model!r} {have} than config.json says ({list(stored)}, not"
        f" {list(expected)})"
    )
