"""Checks a checkpoint's files, and the headers of safetensors files, before any weight is loaded.

transformers silently takes one of two tensors with the same name, converts integers that another library has packed to
floating point, and ignores a `generation_config.json` that it cannot read. Missing or
misshapen weights are detected when they are loaded (`checkpoint`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.core.sampling import SAMPLING_DEFAULTS, SamplingParams

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_FLOATS = ("F", "BF")
"""Prefixes of the names of floating-point dtypes; all others are integers, booleans and complex numbers."""


def require_sound(folder: Path, *, quantized: bool) -> None:
    """Raise `ConfigError` if the files contradict each other or the configuration. `quantized`: the configuration
    describes quantized weights. Weights in other files than safetensors are not checked."""
    _require_generation_config(folder / GENERATION)
    file_of: dict[str, str] = {}
    for name in _files(folder):
        for tensor, number_format in _tensors(folder / name):
            if tensor in file_of and not _same(tensor, folder / file_of[tensor], folder / name):
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
    if (folder / WHOLE).is_file():
        return [WHOLE]
    index = folder / INDEX
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


def _tensors(path: Path) -> Iterator[tuple[str, str]]:
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


def _same(tensor: str, left_path: Path, right_path: Path) -> bool:
    with safe_open(left_path, framework="pt") as left, safe_open(right_path, framework="pt") as right:
        return bool(torch.equal(left.get_tensor(tensor), right.get_tensor(tensor)))
