from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvferry.engine.ops.linear import ACTIVATIONS as KNOWN
from kvferry.engine.ops.linear import PackedLinear, can_pack, pack_gated, pack_together, vector_length
from kvferry.engine.ops.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "relu_squared": lambda x: nn.functional.relu(x) ** 2,
}
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


def make_linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@both_dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (1, 1), (77, 33), (513, 40), (1030, 16), (2048, 130)])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 32, 200])
def test_a_packed_layer_is_the_layer(rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    linear = make_linear(inputs, outputs, dtype, bias=bias)
    x = torch.randn(rows, inputs).to(dtype)
    found = PackedLinear(linear.weight, linear.bias)(x)
    expected = linear.double()(x.double()).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@both_dtypes
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    packed = PackedLinear(make_linear(768, 100, dtype).weight)
    x = torch.randn(300, 768).to(dtype)
    whole = packed(x)
    for start, end in ((0, 1), (5, 13), (100, 300)):
        assert torch.equal(packed(x[start:end]), whole[start:end])


def test_threads_change_nothing() -> None:
    native = library()
    assert native is not None
    packed, x = PackedLinear(make_linear(256, 512, torch.float32).weight), torch.randn(40, 256)
    alone = packed(x)
    native.set_threads(3)
    together = packed(x)
    native.set_threads(torch.get_num_threads())
    assert torch.equal(alone, together)


def test_any_shape_and_stride_of_input_is_taken() -> None:
    linear = make_linear(32, 48, torch.float32, bias=True)
    packed = PackedLinear(linear.weight, linear.bias)
    wide = torch.randn(2, 5, 64)
    for x in (wide[..., :32], wide[..., ::2], wide[0, 0, :32], wide[..., :32].transpose(0, 1), wide[:0, :, :32]):
        torch.testing.assert_close(packed(x), linear(x))


@both_dtypes
def test_layers_with_the_same_input_become_one(dtype: torch.dtype) -> None:
    layers = [make_linear(64, 96, dtype), make_linear(64, 32, dtype, bias=True), make_linear(64, 16, dtype)]
    x = torch.randn(3, 64).to(dtype)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    torch.testing.assert_close(pack_together(*layers)(x), expected, **TOLERANCE[dtype])


@both_dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", KNOWN)
def test_gate_and_value_become_one(activation: str, bias: bool, dtype: torch.dtype) -> None:
    gate, value = (make_linear(64, 3 * vector_length(), dtype, bias=bias) for _ in range(2))
    value.weight.mul_(0.7)
    x = 4 * torch.randn(9, 64).to(dtype)
    packed = pack_gated(gate, value)
    packed.gate = activation
    expected = ACTIVATIONS[activation](gate.double()(x.double())) * value.double()(x.double())
    found, expected = packed(x), expected.to(dtype)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("activation", KNOWN)
def test_extreme_gates_stay_exact(activation: str) -> None:
    length = vector_length()
    gate, value = make_linear(1, length, torch.float32), make_linear(1, length, torch.float32)
    gate.weight[:, 0] = torch.tensor([-1e4, -100.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 1e4]).repeat(2)[:length]
    value.weight.fill_(1)
    packed = pack_gated(gate, value)
    packed.gate = activation
    expected = ACTIVATIONS[activation](gate.weight[:, 0].double()).float()[None]
    torch.testing.assert_close(packed(torch.ones(1, 1)), expected, rtol=1e-5, atol=1e-12)


def test_only_ordinary_layers_are_packed() -> None:
    ordinary = make_linear(8, 8, torch.float32)
    hooked, odd = make_linear(8, 8, torch.float32), make_linear(8, 8, torch.float16)
    hooked.register_forward_hook(lambda *call: None)

    class Special(nn.Linear):
        pass

    assert can_pack(ordinary)
    for other in (hooked, odd, Special(8, 8), nn.Identity(), None):
        assert not can_pack(ordinary, other)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 8, got 4"):
        PackedLinear(make_linear(8, 8, torch.float32).weight)(torch.zeros(4, 4))


READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: torch.ones(3, len(weight), dtype=weight.dtype) @ weight,
    "a row": lambda weight: weight[1],
    "a slice": lambda weight: weight[:, 3:9] * 2,
    "copied": lambda weight: weight.detach().clone(),
    "its data": lambda weight: weight.data,
    "with others": lambda weight: torch.cat([weight, weight.new_ones(1, weight.shape[1])]),
    "normed": lambda weight: nn.functional.normalize(weight.float(), dim=0),
    "wider": lambda weight: weight.to(torch.float64),
    "as an embedding": lambda weight: nn.functional.embedding(torch.tensor([1, 0]), weight),
}


@both_dtypes
@pytest.mark.parametrize("reading", READINGS)
def test_a_weight_that_is_read_is_what_it_was(reading: str, dtype: torch.dtype) -> None:
    """Some modelling code reads `layer.weight` instead of calling the layer."""
    for linear in (make_linear(77, 33, dtype), make_linear(64, 96, dtype), make_linear(1030, 2, dtype)):
        weight: Any = PackedLinear(linear.weight).weight
        assert (weight.shape, weight.dtype, weight.device) == (linear.weight.shape, dtype, linear.weight.device)
        found, expected = READINGS[reading](weight), READINGS[reading](linear.weight.data)
        assert found.device == expected.device
        assert torch.equal(found, expected)


@both_dtypes
@pytest.mark.parametrize("wide", [False, True])
def test_a_product_with_a_weight_that_is_read_is_the_layers(wide: bool, dtype: torch.dtype) -> None:
    linear = make_linear(768, 100, dtype, bias=True)
    packed, x = PackedLinear(linear.weight, linear.bias), torch.randn(40, 768).to(dtype)
    layers: tuple[Any, Any] = (packed, linear)
    casts: tuple[Callable[[Tensor], Tensor], ...] = (
        (torch.Tensor.float, lambda value: value.type(torch.float32), lambda value: value.to(torch.float32))
        if wide
        else (lambda value: value,)
    )
    for cast in casts:
        found, expected = (nn.functional.linear(cast(x), cast(one.weight), cast(one.bias)) for one in layers)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
        alone = nn.functional.linear(cast(x[7:8]), weight=cast(packed.weight), bias=cast(packed.bias))
        assert torch.equal(alone, found[7:8])
    if not wide:
        assert torch.equal(found, packed(x))


def test_a_packed_weight_cannot_be_changed() -> None:
    packed = PackedLinear(make_linear(8, 8, torch.float32).weight)
    before = packed.unpacked().clone()
    for change in (lambda weight: weight.mul_(2), lambda weight: weight.copy_(before), lambda weight: weight.zero_()):
        with pytest.raises(RuntimeError, match="would change a weight that is packed"):
            change(packed.weight)
    assert torch.equal(packed.unpacked(), before)
