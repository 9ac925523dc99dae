"""Patches of a loaded model: faster code with the same results for some of its modules.

They are applied in the order in which they are named (`engine.patch_names`); `model.patching` then verifies that the
model still computes the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec
from torch import nn

from kvferry.core.settings.options import read_options
from kvferry.engine.patch_names import FLAG, MODEL_PATCHES, split_patch


class NoPatchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a patch that has none."""


class ModelPatch(ABC):
    """A patch for one model. Each rank of an instance makes its own."""

    options_type: ClassVar[type[msgspec.Struct]] = NoPatchOptions
    """A frozen struct with a default for each field: the options that may follow the name after `?`."""

    verifies_itself: ClassVar[bool] = False
    """True if `apply` itself compares the model before and after, so that `model.patching` need not."""

    def __init__(self, options: msgspec.Struct) -> None:
        self.options = options

    @abstractmethod
    def apply(self, model: nn.Module) -> int:
        """Change modules of `model` in place. Returns their number; 0 if the patch does not fit.

        `model` is a causal language model of transformers with its weights (a rank's share of them), in evaluation
        mode, on its device; called under `torch.inference_mode`. Attention must still be computed by the function that
        the model takes from `transformers.AttentionInterface`, which is kvferry's paged attention. An exception ends
        the start of the instance.
        """


def make_patch(text: str) -> ModelPatch:
    """The patch that `NAME` or `NAME?option=value&…` names. Raises `ConfigError`."""
    name, options = split_patch(text)
    kind: type[ModelPatch] = MODEL_PATCHES.find(name, ModelPatch)
    return kind(read_options(kind.options_type, options, f"{FLAG} {name}"))
