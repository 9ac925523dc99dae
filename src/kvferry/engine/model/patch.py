"""Patches of a loaded model: faster code for some of its modules, which computes the same.

`--model-patch` names patches of kvferry (`MODEL_PATCHES`), entry points of the group `kvferry.model_patches` in other
packages, or `module:Class`, each with options: `my_patch?min_rows=16`. They are applied in the order given;
`model.patching` then verifies that the model still computes the same. Imports no torch, so that names are checked
before anything is started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qsl

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint
from kvferry.core.options import read_options

if TYPE_CHECKING:  # a patch is named before torch is needed
    from torch import nn

FLAG = "--model-patch"
MODEL_PATCHES = ExtensionPoint(
    FLAG, {"cpu_kernels": "kvferry.engine.ops.cpu_kernels:CpuKernels"}, "kvferry.model_patches"
)
DEFAULT_PATCHES = ("cpu_kernels",)


class NoPatchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a patch that has none."""


class ModelPatch(ABC):
    """One patch, made for one model. Each rank of an instance makes its own."""

    options_type: ClassVar[type[msgspec.Struct]] = NoPatchOptions
    """A frozen struct with a default for each field: what may follow the name after `?`."""

    verifies_itself: ClassVar[bool] = False
    """Whether `apply` compares the model before and after by itself, so that `model.patching` need not."""

    def __init__(self, options: msgspec.Struct) -> None:
        self.options = options

    @abstractmethod
    def apply(self, model: nn.Module) -> int:
        """Change modules of `model` in place, and return how many; 0 where the patch does not fit.

        `model` is a causal language model of transformers with its weights (a rank's share of them), in evaluation
        mode, on its device; called under `torch.inference_mode`. Attention must still be computed by the function that
        the model takes from `transformers.AttentionInterface`, which is kvferry's paged attention. An exception ends
        the start of the instance.
        """


def require_known_patches(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name or a form of options that can be known to be wrong without importing anything."""
    for text in names:
        name, _ = _split(text)
        MODEL_PATCHES.require_known(name)


def make_patch(text: str) -> ModelPatch:
    """The patch that `NAME` or `NAME?option=value&…` names. Raises `ConfigError` that says what of it is wrong."""
    name, given = _split(text)
    kind: type[ModelPatch] = MODEL_PATCHES.find(name, ModelPatch)
    return kind(read_options(kind.options_type, given, f"{FLAG} {name}"))


def _split(text: str) -> tuple[str, dict[str, str]]:
    name, _, query = text.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=64) if query else []
    except ValueError as error:
        raise ConfigError(f"{FLAG} {text!r}: options are written as ?name=value&name=value") from error
    if len(dict(pairs)) < len(pairs):
        raise ConfigError(f"{FLAG} {text!r} has an option twice")
    return name, dict(pairs)
