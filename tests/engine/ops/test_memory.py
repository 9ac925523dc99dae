from __future__ import annotations

import gc
import weakref

import torch

from kvferry.engine.ops.memory import CHUNK_BYTES, HUGE_PAGE, HugePages


def test_tensors_lie_side_by_side_and_apart() -> None:
    pages = HugePages()
    first, second = pages.empty(10, torch.float32), pages.empty(7, torch.bfloat16)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 64
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.sum() == 10.0
    assert second.sum() == 14.0


def test_what_is_larger_than_a_chunk_gets_its_own() -> None:
    pages = HugePages()
    pages.empty(1, torch.uint8)
    large = pages.empty(CHUNK_BYTES + 1, torch.uint8)
    assert len(large) == CHUNK_BYTES + 1
    large[-1] = 3
    assert pages.empty(8, torch.uint8).data_ptr() > large.data_ptr()


def test_a_chunk_goes_with_its_last_tensor() -> None:
    pages = HugePages()
    kept = pages.empty(4, torch.float32)
    chunk = weakref.ref(kept.untyped_storage())
    del pages
    kept.fill_(5.0)
    assert kept.tolist() == [5.0] * 4
    del kept
    gc.collect()
    assert chunk() is None
