"""Compares `--max-model-len` of vLLM's servers with the model's configuration. vLLM itself reports an error only after
it has been imported in several processes, which takes almost a minute."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import read_whole

_FLAG, _OVERRIDE = "--max-model-len", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {"": 1, **{name: 10 ** (3 * power) for power, name in enumerate("kmgt", 1)}}
_UNITS |= {name: 2 ** (10 * power) for power, name in enumerate("KMGT", 1)}
_LIMITS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys of models' configurations with the maximum number of tokens of a sequence."""


def require_length(arguments: Sequence[str], model: str) -> None:
    """Raise `ConfigError` for a `--max-model-len` among vLLM's `arguments` that vLLM cannot read, or that is more than
    the configuration in the folder `model` allows, with its scaling of positions."""
    text = _value_of(arguments)
    if text is None or text.strip().lower() in ("-1", "auto"):
        return
    match = _LENGTH.fullmatch(text.strip())
    if match is None or ("." in match[1] and (match[2].isupper() or not match[2])):
        raise ConfigError(f"{_FLAG} {text[:80]!r} is no number of tokens that vLLM reads, such as 4096, 25.6k or 4K")
    limit = _limit_of(Path(model))
    if limit is not None and float(match[1]) * _UNITS[match[2]] > limit and os.environ.get(_OVERRIDE) != "1":
        raise ConfigError(
            f"{_FLAG} {text[:80]} is more than the {limit:g} tokens that config.json of {model} allows; vLLM takes more"
            f" only with {_OVERRIDE}=1"
        )


def _value_of(arguments: Sequence[str]) -> str | None:
    """Value of a flag; if it is repeated, the last value."""
    value = None
    for index, argument in enumerate(arguments):
        name, has_value, text = argument.partition("=")
        if name.replace("_", "-") == _FLAG:
            value = text if has_value else next(iter(arguments[index + 1 : index + 2]), None)
    return value


def _limit_of(folder: Path) -> float | None:
    """Maximum number of tokens of a sequence; None: the configuration does not contain it, or cannot be read."""
    try:
        config = msgspec.json.decode(read_whole(folder / "config.json"))
    except (OSError, ConfigError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    parts = [part for part in (config, *_values(config)) if isinstance(part, dict)]
    limits = [part[name] for part in parts for name in _LIMITS if _is_positive(part.get(name))]
    factors = [factor for part in parts for factor in _factors(part)]
    return max(limits) * max([1.0, *factors]) if limits else None


def _factors(config: Mapping[str, Any]) -> Iterator[float]:
    """The factor by which positions are scaled, over all kinds of layers."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        for part in (scaling, *_values(scaling)):
            if isinstance(part, dict) and _is_positive(part.get("factor")):
                yield float(part["factor"])


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
