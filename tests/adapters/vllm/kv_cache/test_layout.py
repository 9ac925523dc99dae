"""What goes into the name of an arrangement, with stand-ins for vLLM's configuration and layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

BLOCK_SIZE = 8


def packing_of(*groups: tuple[str, ...]) -> str:
    """Of layers that differ in their names alone."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvferry.adapters.vllm.kv_cache.layout import GroupShape, KVCacheShape, kv_layout

    spec = SimpleNamespace(num_kv_heads=2, head_size=4, head_size_v=4, page_size_bytes=512, dtype=torch.float32)
    shape = KVCacheShape(tuple(GroupShape(names, (spec,) * len(names), BLOCK_SIZE) for names in groups))
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "BACKEND"))
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(shape.layer_names, layer)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    caches = dict.fromkeys(shape.layer_names, torch.zeros((1, 2, BLOCK_SIZE, 8)))
    return kv_layout(config, shape, caches, "m", 0).packing


def test_layers_in_another_order_are_another_packing() -> None:
    assert packing_of(("a", "b", "c")) == packing_of(("a", "b", "c"))
    assert packing_of(("a", "b", "c")) != packing_of(("a", "c", "b"))


def test_layers_in_other_groups_are_another_packing() -> None:
    assert len({packing_of(("a", "b"), ("c", "d")), packing_of(("a", "c"), ("b", "d")), packing_of(("a", "b"))}) == 3
