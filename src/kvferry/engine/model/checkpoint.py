"""Checks that a checkpoint has exactly the weights of its model, each with the right shape.

transformers initializes missing weights at random and ignores unknown ones, with a warning. A server would then give
wrong answers, so it is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvferry.core.errors import ConfigError


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


def _named(names: Collection[str], what: str) -> str:
    """One of the names, the number of others, and their problem; empty if there are no names."""
    if not names:
        return ""
    # the shortest first: of "a.weight" and "a.weight_scale_inv" the former says more
    first, others = min(names, key=lambda name: (len(name), name)), len(names) - 1
    return f"{first}{_and_others(others)} {'are' if others else 'is'} {what}"


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
