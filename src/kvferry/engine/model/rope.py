"""Rotary embeddings whose factors depend on the length of a sequence, applied to each sequence by itself.

`longrope` (Phi-3 and its relatives) has two sets of factors: one for sequences within the context that the model was
first trained on, one for longer ones. transformers chooses by the largest position of the whole forward pass. In a
batch, one prompt would change another's answer, and the first chunk of a long prompt would be rotated as if it were
short. With `install_rope`, each token gets the factors of its own sequence, by the number of known tokens of that
sequence when it is computed.

A sequence that grows beyond the limit is computed again from its first token, since its keys were rotated with the
other factors. Phi-3's own `generate()` and a forward pass over the whole sequence do the same; the `generate()` of
other families mixes both kinds of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvferry.core.errors import UnsupportedModel
from kvferry.engine.model.attention import current_step

LENGTH_DEPENDENT = "longrope"


def trained_context(settings: Any) -> int | None:
    """Max tokens of a sequence with the short factors of `longrope`; None if the model has no `longrope`.

    Raises `UnsupportedModel` if layers differ in it.
    """
    text = settings.get_text_config()
    borders = {
        _border(parameters, text)
        for parameters in _rope_parameters(text)
        if parameters.get("rope_type") == LENGTH_DEPENDENT
    }
    if len(borders) > 1:
        raise UnsupportedModel(f"{settings.model_type}: the layers' longrope begins at different lengths: {borders}")
    return borders.pop() if borders else None


def install_rope(model: nn.Module, border: int | None) -> None:
    """Make every length-dependent rotary embedding treat each sequence by itself. `border`: the result of
    `trained_context`. Raises `UnsupportedModel` if there is a limit but no such embedding."""
    if border is None:
        return
    modules = [module for module in model.modules() if _depends_on_length(module)]
    if not modules:
        raise UnsupportedModel(f"{type(model).__name__} has longrope parameters and no rotary embedding of that kind")
    for module in modules:
        module.forward = _PerSequence(module.forward, border)


class _PerSequence:
    """The forward method of a rotary embedding: x, position ids [1, T] → cos and sin [1, T, dim]."""

    def __init__(self, forward: Any, border: int) -> None:
        self._forward, self._border = forward, border

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the original twice, so that its largest position makes it choose the short factors for all tokens, then
        the long ones, and take each token's own."""
        step = current_step()
        if step is None or step.long_tokens is None:
            return self._forward(x, position_ids, *args, **kwargs)
        short = self._forward(x, position_ids.clamp(max=self._border - 1), *args, **kwargs)
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), self._border)
        long = self._forward(x, torch.cat([position_ids, beyond], dim=-1), *args, **kwargs)
        chosen = step.long_tokens[None, :, None]
        return tuple(
            torch.where(chosen, long_factor[:, :-1], short_factor)
            for short_factor, long_factor in zip(short, long, strict=True)
        )


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return LENGTH_DEPENDENT in (kinds.values() if isinstance(kinds, dict) else [kinds])


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """The parameters of the whole model, or of each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _border(parameters: dict[str, Any], text: Any) -> int:
    return int(parameters.get("original_max_position_embeddings") or text.max_position_embeddings)
