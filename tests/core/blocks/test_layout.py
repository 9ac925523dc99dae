"""What two sides must agree on, and the name of what they do not."""

from typing import Any

import msgspec
import pytest

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import LayoutMismatch

HERE = KVLayout(
    model_fingerprint="m", layers=(LayerLayout(4, 8, 8), LayerLayout(4, 8, 6)), dtype="float32", block_size=16
)
OPAQUE = msgspec.structs.replace(HERE, packing="theirs", layers=(LayerLayout(4, 8, 8, 4096),))


def changed(layout: KVLayout, **fields: Any) -> KVLayout:
    return msgspec.structs.replace(layout, **fields)


def test_sizes_follow_from_the_numbers() -> None:
    assert HERE.head_bytes(1) == 16 * (8 + 6) * 4
    assert HERE.span_bytes(1) == 4 * HERE.head_bytes(1)
    assert HERE.block_bytes == HERE.span_bytes(0) + HERE.span_bytes(1)
    assert OPAQUE.block_bytes == 4096


def test_same_is_same_in_everything() -> None:
    HERE.require_same(changed(HERE))
    with pytest.raises(LayoutMismatch) as refused:
        HERE.require_same(changed(HERE, tp_rank=1))
    assert refused.value.field == "tp_rank"


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 48])
def test_block_sizes_that_divide_each_other(block_size: int) -> None:
    other = changed(HERE, block_size=block_size)
    HERE.require_reconcilable(other)
    other.require_reconcilable(HERE)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 4), (4, 4), (1, 8)])
def test_tensor_parallel_sizes_that_divide_each_other(ours: int, theirs: int) -> None:
    def shard(tp_size: int) -> KVLayout:
        layers = tuple(LayerLayout(max(1, 4 // tp_size), 8, 8, total_kv_heads=4) for _ in range(2))
        return changed(HERE, layers=layers, tp_size=tp_size)

    shard(ours).require_reconcilable(shard(theirs))
    shard(theirs).require_reconcilable(shard(ours))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("model_fingerprint", {"model_fingerprint": "other"}),
        ("dtype", {"dtype": "bfloat16"}),
        ("kernels", {"kernels": "torch"}),
        ("packing", {"packing": "theirs"}),
        ("block_size", {"block_size": 24}),
        ("block_size", {"block_size": 0}),
        ("number of layers", {"layers": HERE.layers[:1]}),
        ("layers[1].key_dim", {"layers": (HERE.layers[0], LayerLayout(4, 4, 6))}),
        ("layers[0].value_dim", {"layers": (LayerLayout(4, 8, 9), HERE.layers[1])}),
        ("layers[0].model_kv_heads", {"layers": (LayerLayout(2, 8, 8), HERE.layers[1])}),
    ],
)
def test_what_cannot_be_reconciled_is_named(field: str, fields: dict[str, Any]) -> None:
    other = changed(HERE, **fields)
    for one, two in ((HERE, other), (other, HERE)):
        with pytest.raises(LayoutMismatch) as refused:
            one.require_reconcilable(two)
        assert refused.value.field == field
        assert field in str(refused.value)


def test_tensor_parallel_sizes_that_do_not() -> None:
    with pytest.raises(LayoutMismatch, match="tp_size"):
        changed(HERE, tp_size=2).require_reconcilable(changed(HERE, tp_size=3))


@pytest.mark.parametrize(
    ("field", "fields"), [("block_size", {"block_size": 32}), ("tp_size", {"tp_size": 2}), ("tp_rank", {"tp_rank": 1})]
)
def test_spans_without_meaning_move_only_between_equals(field: str, fields: dict[str, Any]) -> None:
    OPAQUE.require_reconcilable(changed(OPAQUE))
    with pytest.raises(LayoutMismatch) as refused:
        OPAQUE.require_reconcilable(changed(OPAQUE, **fields))
    assert refused.value.field == field
