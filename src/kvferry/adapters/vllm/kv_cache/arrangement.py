"""Identifies the arrangement of K and V within a page of an attention backend, by letting the backend write a page.

Two instances of vLLM can exchange pages if they put the same values at the same bytes. This depends on the bytes that
the backend writes, not on the release of vLLM or the backend's name. So the backend's own method writes known keys and
values into a scratch page, and a digest of the page identifies the arrangement.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

_BASE = 251
"""Number of values that one written page distinguishes: integers that even an 8-bit mantissa holds exactly."""
_SCALES_PER_HEAD = "per_token_head"
"""Suffix of vLLM's names of cache dtypes that store scales in the page too."""


def page_digest(layer: Any, cache: torch.Tensor, page_bytes: int) -> str | None:
    """A digest of the bytes that the backend of `layer` writes for known keys and values; None if it cannot be called.

    `layer`: vLLM's attention layer; `cache` [num_blocks, heads, block_size, content]: its view of the KV cache, which
    is not changed; `page_bytes`: the size of one of its pages.
    """
    if str(getattr(layer, "kv_cache_dtype", "")).endswith(_SCALES_PER_HEAD):
        return (
            None  # values are stored relative to the greatest value of their group, so the patterns cannot be read back
        )
    try:
        digest = hashlib.sha256()
        for keys, values in _patterns(layer, cache):
            digest.update(_write(layer, cache, page_bytes, keys, values))
        return digest.hexdigest()[:12]
    except Exception as error:  # noqa: BLE001 - a backend or its compiler may raise any type, which must not end vLLM's start
        logger.info("attention backend %s does not show how it arranges a page: %r", type(layer).__name__, error)
        return None


def _patterns(layer: Any, cache: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [block_size, heads, head_size] whose elements are digits of their own index, the lowest digits
    first: together, the patterns distinguish all elements of a page."""
    impl = layer.impl
    shape = (cache.shape[2], impl.num_kv_heads, impl.head_size)
    count = 2 * shape[0] * shape[1] * shape[2]
    indices = torch.arange(count, device=cache.device).reshape(2, *shape)
    while count > 0:
        keys, values = (indices % _BASE).to(_dtype_of(layer, cache))
        yield keys.contiguous(), values.contiguous()
        indices, count = indices // _BASE, count // _BASE


def _dtype_of(layer: Any, cache: torch.Tensor) -> torch.dtype:
    """The dtype of keys and values. A quantized cache has another dtype."""
    dtype = getattr(layer, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else cache.dtype


def _write(layer: Any, cache: torch.Tensor, page_bytes: int, keys: torch.Tensor, values: torch.Tensor) -> bytes:
    num_elements = page_bytes // cache.element_size()
    memory = torch.zeros(num_elements, dtype=cache.dtype, device=cache.device)
    page = memory.as_strided((1, *cache.shape[1:]), (num_elements, *cache.stride()[1:]))
    slots = torch.arange(len(keys), device=cache.device)
    impl = copy.copy(layer.impl)  # the backend may keep views of the first cache that it gets
    impl.do_kv_cache_update(layer, keys, values, page, slots)
    return bytes(memory.view(torch.uint8).cpu().numpy().data)
