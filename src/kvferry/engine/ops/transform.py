"""Makes a loaded Hugging Face model fast on the CPU, in place: a list of replacements, each verified before it is made.

One forward pass of the unmodified model is recorded: inputs and outputs of each module that may be replaced, and the
arguments of the attention function. A replacement must reproduce its record, or the module stays unchanged; so the
peculiarities of a model family (a multiplier, another pairing in the rotation) are detected without knowing the family.
All remaining `nn.Linear` are packed, and so are weights that modelling code multiplies with `F.linear` directly, mostly
in MoE routers: these products also give a row the same bits in any batch. Does nothing on other devices, or without the
kernels.

On tensor-parallel ranks, modules that contain collective operations (attention, feed-forward, the whole layer) are not
replaced; their parts are. Ranks may therefore replace different modules without waiting for each other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from kvferry.engine.ops.decoder_layer import FusedDecoderLayer, Workspace
from kvferry.engine.ops.experts import FusedExperts, holds_experts
from kvferry.engine.ops.gated_mlp import FusedGatedMLP
from kvferry.engine.ops.linear import PACKABLE, PackedLinear, can_pack, factors_of, is_plain_weight, vector_length
from kvferry.engine.ops.native import library
from kvferry.engine.ops.norm import FusedRMSNorm
from kvferry.engine.ops.self_attention import FusedSelfAttention
from kvferry.engine.ops.sharded import replace_sharded_linears

logger = logging.getLogger(__name__)

RECORDER = "kvferry_recorder"
NUM_TOKENS = 5
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference that counts as rounding, relative to the whole output. A wrong formula differs by far more."""
SHORT_VECTOR = 4
"""Length of a vector of SSE, with which widening bfloat16 shows."""
FINAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.8}
"""The same for the logits of the whole model: rounding in bfloat16 may send a token to another expert."""

_CASTS = (Tensor.float, Tensor.type, Tensor.to)


class FusedForward(Protocol):
    """A faster forward method for one module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward method."""

    def install(self, module: nn.Module) -> None:
        """Replace the module's forward method, and free the weights that it no longer needs."""


SCALES = {"norm": (1e-3,), "mlp": (30.0, 1000.0), "experts": (30.0, 1000.0)}
"""Factors of the recorded input for which a replacement must agree too: small inputs reveal a norm's epsilon, large
ones the limit of an activation."""


@dataclass
class ModuleRecord:
    """One call of a module, and the call of the attention function within it, if there was one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    attention: AttentionRecord | None = None


@dataclass
class AttentionRecord:
    """One call of the attention function."""

    tensors: tuple[Tensor, Tensor, Tensor]
    """Query, key and value."""
    settings: dict[str, Any]


def optimize(model: nn.Module) -> Counter[str]:
    """Replace modules with faster ones; returns their number by kind. Call it after `torch.set_num_threads`.

    Takes a causal language model of transformers in evaluation mode. Raises `RuntimeError` if the logits have changed
    in the end, which would be a defect of kvferry.
    """
    done: Counter[str] = Counter()
    if library() is None or not _is_ordinary(model):
        return done
    with torch.inference_mode():
        logits, records = record_forward(model)
        done["sharded Linear"] += replace_sharded_linears(model)
        if done["sharded Linear"]:
            _, records = record_forward(model)
        if vector_length() == SHORT_VECTOR and logits.dtype == torch.bfloat16:
            logger.warning("decoding in bfloat16 is up to a seventh slower than in float32 on this processor (no AVX2)")
        workspace = Workspace()
        for module, recorded in records.items():
            done[type(module).__name__] += replace(module, recorded, workspace)
        done["Linear"] += pack_linears(model)
        with recorded_attention(model):
            done["bare weight"] += pack_bare_weights(model)
        after, _ = record_forward(model)
        if not _same(after, logits, FINAL_TOLERANCE[logits.dtype]):
            raise RuntimeError("the model's logits changed when it was optimized; set KVFERRY_NATIVE=0 to go without")
    logger.info(
        "modules replaced for this CPU: %s", ", ".join(f"{count} {name}" for name, count in done.items() if count)
    )
    return done


def _is_ordinary(model: nn.Module) -> bool:
    """True if all parameters are on the CPU, in one dtype that the kernels support."""
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    return len(kinds) == 1 and kinds <= {("cpu", dtype) for dtype in PACKABLE}


# Recording a forward pass.


def record_forward(model: nn.Module) -> tuple[Tensor, dict[nn.Module, ModuleRecord]]:
    """Run `model` on a few tokens. Returns its logits [1, NUM_TOKENS, vocab] and the record of each replaceable module,
    parts before the modules that contain them."""
    records: dict[nn.Module, ModuleRecord] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        records.setdefault(module, ModuleRecord(args, kwargs, output))

    candidates = [module for module in model.modules() if kind_of(module) is not None]
    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in candidates]
    with recorded_attention(model) as attention:
        logits = run(model)
    for hook in hooks:
        hook.remove()
    for module, recorded in records.items():
        recorded.attention = attention.get(attending_part(module))
    return logits, dict(sorted(records.items(), key=lambda item: KINDS.index(kind_of(item[0]))))


def run(model: Any) -> Tensor:
    """Logits [1, NUM_TOKENS, vocab] of fixed tokens at positions from the first to the last."""
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    ids = torch.arange(1, NUM_TOKENS + 1, device=device)[None] * 7919 % embeddings.num_embeddings
    # Spread over all positions, as a family may differ at large ones only (a scale that grows with the position).
    last = getattr(model.config.get_text_config(), "max_position_embeddings", NUM_TOKENS + 3) - 1
    positions = torch.linspace(min(3, last), last, NUM_TOKENS, device=device).long()[None]
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


@contextmanager
def recorded_attention(model: Any) -> Iterator[dict[nn.Module, AttentionRecord]]:
    """Replace the attention function, while the body runs, by a simple mix of its inputs, recorded by module."""
    calls: dict[nn.Module, AttentionRecord] = {}

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        calls[module] = AttentionRecord((query.clone(), key.clone(), value.clone()), settings)
        group = query.shape[1] // key.shape[1]
        mixed = value.repeat_interleave(group, dim=1) + query.mean(dim=-1, keepdim=True)
        return mixed.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register(RECORDER, attend)
    model.config._attn_implementation = RECORDER
    try:
        yield calls
    finally:
        model.config._attn_implementation = before


# Modules and their replacements.

KINDS = ("norm", "mlp", "experts", "attention", "layer")
"""Kinds of modules that are replaced, parts before the modules that contain them."""

_CHILDREN = (
    ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ("mlp", ("gate_up_proj", "down_proj")),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("layer", ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")),
)


def kind_of(module: nn.Module) -> str | None:
    """The kind of `module`, one of KINDS; None: no such kind."""
    if type(module).__name__.endswith("RMSNorm"):
        return "norm"
    if holds_experts(module):
        return "experts"
    children = dict(module.named_children()).keys()
    return next((kind for kind, names in _CHILDREN if children >= set(names)), None)


def attending_part(module: Any) -> Any:
    """The module that calls the attention function: `module` itself, or its `self_attn`."""
    return getattr(module, "self_attn", module)


def fused_candidates(module: nn.Module, recorded: ModuleRecord, workspace: Workspace) -> Iterator[FusedForward]:
    """Faster forward methods to try for `module`."""
    match kind_of(module):
        case "norm":
            yield from FusedRMSNorm.variants(module)
        case "mlp":
            yield from FusedGatedMLP.variants(module)
        case "experts":
            yield from FusedExperts.variants(module)
        case "attention" if recorded.attention is not None:
            settings = {k: v for k, v in recorded.attention.settings.items() if k not in recorded.kwargs}
            yield from FusedSelfAttention.variants(module, recorded.attention.tensors[0].shape[-1], settings)
        case "layer" if recorded.attention is not None:
            yield from FusedDecoderLayer.variants(module, workspace)


def replace(module: nn.Module, recorded: ModuleRecord, workspace: Workspace) -> bool:
    """Replace `module`'s forward method by the first proposal that reproduces the record. Returns True if one did."""
    for fused in fused_candidates(module, recorded, workspace):
        if _reproduces(fused, module, recorded):
            fused.install(module)
            return True
    return False


def _reproduces(fused: FusedForward, module: nn.Module, recorded: ModuleRecord) -> bool:
    try:
        if recorded.attention is None:
            scales = SCALES[kind_of(module) or ""]
            return (
                _same(fused(*recorded.args, **recorded.kwargs), recorded.output)
                and all(_same_scaled(fused, module, recorded, scale) for scale in scales)
                and (not isinstance(fused, FusedExperts) or _same_of_every_expert(fused, module, recorded))
            )
        return _attends_equally(fused, attending_part(module), recorded, recorded.attention)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        return False  # it does not accept the original's arguments


def _same_scaled(fused: FusedForward, module: nn.Module, recorded: ModuleRecord, scale: float) -> bool:
    args = (recorded.args[0] * scale, *recorded.args[1:])
    return _same(fused(*args, **recorded.kwargs), module(*args, **recorded.kwargs))


def _same_of_every_expert(fused: FusedExperts, module: Any, recorded: ModuleRecord) -> bool:
    """True if the results agree for every expert: the recorded tokens went to few of them. False also if the module
    uses a number beyond its experts: some have experts without weights, which return their input."""
    hidden, chosen, shares = recorded.args
    rows, count = torch.arange(fused.num_experts) % len(hidden), fused.num_experts
    all_experts = (torch.arange(count)[:, None] + torch.arange(chosen.shape[1])) % count
    routed = (hidden[rows], all_experts.to(chosen.dtype), shares[rows])
    if not _same(fused(*routed), module(*routed)):
        return False
    config: Any = getattr(module, "config", None)
    before = getattr(config, "_experts_implementation", None)
    try:
        if before is not None:  # other implementations use such a number as an address
            config._experts_implementation = "eager"
        return not bool(module(hidden, torch.full_like(chosen, count), shares).any())
    except (IndexError, RuntimeError):
        return True
    finally:
        if before is not None:
            config._experts_implementation = before


def _attends_equally(fused: FusedForward, attending: Any, recorded: ModuleRecord, original: AttentionRecord) -> bool:
    with recorded_attention(attending) as calls:
        output = fused(*recorded.args, **recorded.kwargs)
    actual, expected = (value[0] if isinstance(value, tuple) else value for value in (output, recorded.output))
    call = calls[attending]
    return (
        type(output) is type(recorded.output)
        and _same(actual, expected)
        and all(map(_same, call.tensors, original.tensors))
        and _equal_settings(call.settings, original.settings)
    )


def _same(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    limit = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    return bool((actual.double() - expected.double()).norm() <= limit * expected.double().norm())


def _equal_settings(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return actual.keys() == expected.keys() and all(
        value is expected[name] or (not isinstance(value, Tensor) and value == expected[name])
        for name, value in actual.items()
    )


def pack_linears(model: nn.Module) -> int:
    """Pack every remaining linear layer. Returns their number."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and can_pack(child):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                count += 1
    return count


class _Multiplied(TorchFunctionMode):
    """Records, while active, the parameters that are used as weights of `F.linear`, directly or after a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied: set[int] = set()
        self._sources: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        """Results of casts, kept alive so that their ids are not reused."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _CASTS and isinstance(args[0], nn.Parameter):
            self._sources[id(result)] = args[0]
            self._kept.append(result)
        if function is functional.linear:
            weight = factors_of(*args, **(kwargs or {}))[1]
            self.multiplied.add(id(self._sources.get(id(weight), weight)))
        return result


def pack_bare_weights(model: nn.Module) -> int:
    """Replace the parameters that a forward pass multiplies by `F.linear` outside of `nn.Linear`. Returns their
    number."""
    with _Multiplied() as products:
        run(model)
    count = 0
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            is_own = type(module) not in (nn.Linear, nn.Embedding) and id(value) in products.multiplied
            if value is not None and is_own and is_plain_weight(value):
                delattr(module, name)
                setattr(module, name, PackedLinear(value).weight)
                count += 1
    return count
