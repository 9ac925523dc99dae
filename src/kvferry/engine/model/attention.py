"""The attention function that transformers' models call: attention over the paged KV cache; and the run that finds each
layer's KV layout and window.

transformers' own modelling code computes Q, K and V of all new tokens of a step, concatenated in one row, and calls the
function that is registered here. It writes K and V into the paged cache and attends to the pages, so the model needs
neither a cache object nor a mask.

Each layer's window is read from the mask that the model itself builds, because some families have a window in the mask
only. transformers builds every mask from a function of (query position, key position). While a model is probed, these
functions are recorded instead of being expanded to tensors, so that they can be evaluated at positions far beyond the
probe's own tokens: two tokens are enough to find a window of thousands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvferry.core.blocks.layout import LayerLayout
from kvferry.core.errors import UnsupportedModel
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.ops.attention import paged_attention, write_kv
from kvferry.engine.ops.batch import AttentionBatch

ATTENTION_NAME = "kvferry"
PROBE_NAME = "kvferry_probe"

# Arguments of models that have no effect on paged attention.
_IGNORED_ARGUMENTS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "cache_position",
    }
    | {"is_causal", "logits_to_keep", "num_items_in_batch", "deterministic", "output_router_logits"}
    | {"position_embeddings"}
)

_TOLERANCE = 1e-2
"""Relative to the largest value: keys of two ranks that differ by less are the same heads, computed twice."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) → True if the key is visible; broadcasts."""

_MAX_POSITIONS = 1 << 22
"""Maximum number of positions for which masks are evaluated."""


class LayerHooks(Protocol):
    """Hooks before and after each layer's attention: a connector's worker side."""

    def wait_layer(self, layer: int) -> None:
        """Called before the attention of `layer` reads the cache; may block until the layer is loaded."""

    def save_layer(self, layer: int) -> None:
        """Called when this step's K and V of `layer` are written. Must not block."""


@dataclass
class MaskRecorder:
    """The masks of one forward pass: the placeholders that the model passes on, and their functions."""

    recorded: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def build(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **others: Any) -> Tensor:
        """transformers' mask interface. Returns a placeholder, bool [1, 1, q_length, kv_length]."""
        placeholder = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=others.get("device"))
        self.recorded.append((placeholder, mask_function))
        return placeholder

    def function_of(self, mask: Tensor) -> MaskFunction | None:
        """The function whose placeholder `mask` is, or a slice of that placeholder with the same shape; None if the
        model built `mask` itself."""
        return next((function for placeholder, function in self.recorded if _is_same_mask(mask, placeholder)), None)


def _is_same_mask(mask: Tensor, placeholder: Tensor) -> bool:
    return mask.data_ptr() == placeholder.data_ptr() and mask.shape == placeholder.shape


@dataclass(frozen=True)
class PagedContext:
    """One step. `layers`: each layer's cache, in the form that `ops.attention` describes. `windows`: each layer's
    sliding window in tokens, the token itself included; None: full attention."""

    batch: AttentionBatch
    layers: list[Tensor]
    windows: Sequence[int | None]
    long_tokens: Tensor | None = None
    """bool [T]: true for tokens of sequences beyond the trained context (`rope`). None if the model has no such
    limit."""
    hooks: LayerHooks | None = None


@dataclass
class ProbeContext:
    """A dry run that finds the KV layout of each layer; attention returns zeros."""

    layers: dict[int, LayerLayout] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    masks: MaskRecorder = field(default_factory=MaskRecorder)
    functions: dict[int, MaskFunction | None] = field(default_factory=dict)
    """Each layer's mask; None if the layer got no mask."""


@dataclass(frozen=True)
class ProbedLayers:
    """The KV that each layer stores for a token on this rank, and its sliding window (the token itself included; None:
    full attention)."""

    layouts: tuple[LayerLayout, ...]
    windows: tuple[int | None, ...]


_current = threading.local()


def current_step() -> PagedContext | None:
    """The step that this thread is computing; None outside of one."""
    context = getattr(_current, "context", None)
    return context if isinstance(context, PagedContext) else None


@contextmanager
def attention_context(context: PagedContext | ProbeContext) -> Iterator[None]:
    """Use `context` for attention calls of this thread while the body runs."""
    _current.context = context
    try:
        yield
    finally:
        _current.context = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, key_dim], key [1, kv_heads, T, key_dim] and value [1,
    kv_heads, T, value_dim], after RoPE, of the dtype of the model.

    Returns [1, T, heads, value_dim]. `s_aux`: attention sinks, [heads]. The window comes from the layer's mask
    (`probe_layers`), not from `sliding_window`.
    """
    context = _current.context
    if isinstance(context, ProbeContext):
        return _probe(context, module, query, key, value, attention_mask, others), None
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own in some steps only")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if context.hooks is not None:
        context.hooks.wait_layer(layer)
    cache = context.layers[layer]
    write_kv(cache, key[0].transpose(0, 1), value[0].transpose(0, 1), context.batch.slots)
    attended = paged_attention(
        query[0].transpose(0, 1),
        cache,
        context.batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=context.windows[layer],
        softcap=softcap,
        sinks=s_aux,
    )
    if context.hooks is not None:
        context.hooks.save_layer(layer)
    return attended.unsqueeze(0), None


def register_attention() -> None:
    """Register `attn_implementation="kvferry"` with transformers. There is no mask function for it, so models pass no
    mask."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionInterface.register(PROBE_NAME, attention)
    AttentionMaskInterface.register(PROBE_NAME, _build_mask)


def _build_mask(**settings: Any) -> Tensor:
    """transformers' mask interface while a model is probed."""
    context: ProbeContext = _current.context
    return context.masks.build(**settings)


def _probe(
    context: ProbeContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    extra: dict[str, Any],
) -> Tensor:
    layer = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if not isinstance(layer, int) or layer in context.layers:
        raise UnsupportedModel(f"{name} shares KV between layers or does not number them")
    function = None if attention_mask is None else context.masks.function_of(attention_mask)
    if attention_mask is not None and function is None:
        raise UnsupportedModel(f"{name} brings an attention mask of its own, which a paged cache cannot apply")
    if getattr(module, "is_causal", True) is not True:
        raise UnsupportedModel(f"{name} is not causal{_encoder_hint(module)}")
    unknown = [key for key, argument in extra.items() if key not in _IGNORED_ARGUMENTS and isinstance(argument, Tensor)]
    if unknown:
        raise UnsupportedModel(f"{name} passes {', '.join(unknown)} to attention, which kvferry does not know")
    context.layers[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3])
    context.keys[layer] = key.clone()
    context.functions[layer] = function
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _encoder_hint(module: nn.Module) -> str:
    """A hint how to make a BERT-like encoder causal; empty for other models."""
    if getattr(getattr(module, "config", None), "is_decoder", None) is not False:
        return ""
    return (
        ': the model is an encoder, because config.json does not have "is_decoder": true. Set it only if the checkpoint'
        " was trained to continue texts"
    )


def probe_layers(model: Any, device: torch.device, placement: RankPlacement) -> ProbedLayers:
    """Find each layer's KV layout and window on this rank, by running the model once on two tokens. All ranks call it
    together.

    Raises `UnsupportedModel` if a layer does something that paged attention does not reproduce.
    """
    context = ProbeContext()
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device).unsqueeze(0)
    with torch.inference_mode(), attention_context(context), implementation(model, PROBE_NAME):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    if sorted(context.layers) != list(range(len(context.layers))) or not context.layers:
        raise UnsupportedModel("some layers do not use attention, or not through transformers' attention interface")
    order = range(len(context.layers))
    layouts = [context.layers[layer] for layer in order]
    windows = _windows([context.functions[layer] for layer in order], _num_positions(model), device, model)
    return ProbedLayers(_locate_heads(layouts, [context.keys[layer] for layer in order], placement), windows)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Switch the attention of `model` to transformers' implementation `name` while the body runs. Raises `ValueError`
    if the model does not have it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _windows(
    functions: Sequence[MaskFunction | None], num_positions: int, device: torch.device, model: Any
) -> tuple[int | None, ...]:
    model_name, windows = type(model).__name__, dict[int, int | None]()
    for function in functions:
        if function is not None and id(function) not in windows:
            windows[id(function)] = window_of(function, num_positions, device, model_name)
    return tuple(None if function is None else windows[id(function)] for function in functions)


def _num_positions(model: Any) -> int:
    return int(model.config.get_text_config().max_position_embeddings)


def _locate_heads(
    layers: Sequence[LayerLayout], keys: Sequence[Tensor], placement: RankPlacement
) -> tuple[LayerLayout, ...]:
    """The layers with `first_kv_head` and `total_kv_heads` filled in. Some families keep all heads on every rank, so
    the ranks compare their keys. `keys`: each layer's keys [1, kv_heads, T, dim] of the same tokens on all ranks. All
    ranks call it together."""
    if placement.size == 1:
        return tuple(layers)
    own_keys = torch.cat([key.float().flatten() for key in keys])
    gathered = [torch.empty_like(own_keys) for _ in range(placement.size)]
    dist.all_gather(gathered, own_keys)
    by_layer = zip(*(keys_of_rank.split([key.numel() for key in keys]) for keys_of_rank in gathered), strict=True)
    return tuple(
        layer if _are_same_heads(keys_by_rank) else _split_heads(layer, placement)
        for layer, keys_by_rank in zip(layers, by_layer, strict=True)
    )


def _are_same_heads(keys: Sequence[Tensor]) -> bool:
    first = keys[0]
    return all(bool((other - first).abs().max() <= _TOLERANCE * first.abs().max()) for other in keys[1:])


def _split_heads(layer: LayerLayout, placement: RankPlacement) -> LayerLayout:
    count = layer.num_kv_heads
    return msgspec.structs.replace(layer, first_kv_head=placement.rank * count, total_kv_heads=placement.size * count)


def window_of(function: MaskFunction, num_positions: int, device: torch.device, model_name: str) -> int | None:
    """The sliding window of a causal mask, the token itself included; None: full attention. `model_name` names the
    model in errors.

    Raises `UnsupportedModel` if the mask is neither of the two somewhere up to `num_positions`.
    """
    last = min(num_positions, _MAX_POSITIONS) - 1
    key_positions = torch.arange(last + 1, device=device)
    window = int(_mask_row(function, last, key_positions, model_name).sum())
    checked_positions = {0, 1, 2, 3, window - 1, window, window + 1, 2 * window, last // 2, last - 1, last}
    for position in sorted(position for position in checked_positions if 0 <= position <= last):
        expected = (key_positions <= position) & (key_positions > position - window)
        if not torch.equal(_mask_row(function, position, key_positions, model_name), expected):
            raise UnsupportedModel(
                f"{model_name} has an attention mask that is neither causal nor a sliding window (position {position})"
            )
    return None if window == last + 1 else window


def _mask_row(function: MaskFunction, position: int, key_positions: Tensor, model_name: str) -> Tensor:
    """bool [len(key_positions)]: true for keys that the query at `position` sees."""
    zero = torch.zeros(1, dtype=torch.long, device=key_positions.device)
    try:
        return torch.as_tensor(
            function(zero, zero, zero + position, key_positions), device=key_positions.device
        ).expand(len(key_positions))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{model_name} has an attention mask that depends on more than positions ({error})"
        ) from error
