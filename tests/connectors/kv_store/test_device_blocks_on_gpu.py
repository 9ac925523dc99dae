"""Copies between a GPU and pinned host memory. Run where there is one: `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kv_support import make_layout

from kvferry.connectors.kv_store.blocks import block_bytes_of
from kvferry.core.blocks.layout import KVLayout
from kvferry.transport.memory import BlockMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_BLOCKS = 512


@pytest.mark.parametrize("shift", [0, 16, 3])
@pytest.mark.parametrize("layout", [make_layout(block_size=16), make_layout(num_layers=2, block_size=4096)], ids=str)
def test_blocks_go_out_and_come_back(layout: KVLayout, shift: int) -> None:
    """`shift` bytes from where memory is aligned."""
    num_blocks = min(NUM_BLOCKS, 2**28 // layout.block_bytes)
    contents = np.random.default_rng(1).integers(0, 256, num_blocks * layout.block_bytes, np.uint8)
    tensor = torch.zeros(len(contents) + 64, dtype=torch.uint8, device="cuda:0")[shift : shift + len(contents)]
    tensor.copy_(torch.from_numpy(contents))
    memory = BlockMemory.dense(layout, num_blocks, tensor.data_ptr(), device="cuda:0")
    blocks = block_bytes_of(memory, saves_are_complete=False)
    block_ids = np.random.default_rng(2).permutation(num_blocks)[: num_blocks // 2].tolist()
    found = blocks.begin_copy(block_ids).end()
    for block_id, views in zip(block_ids, found, strict=True):
        for layer, view in enumerate(views):
            [(offset, length)] = memory.spans(layer, [block_id])
            assert bytes(view) == contents[offset : offset + length].tobytes()
    tensor.zero_()
    torch.cuda.synchronize()
    landing = blocks.staging_buffer(range(layout.num_layers), block_ids)
    for arrived, views in zip(landing.views, found, strict=True):
        for into, view in zip(arrived, views, strict=True):
            into[:] = view
    landing.commit()
    expected = np.zeros_like(contents)
    for block_id in block_ids:
        for layer in range(layout.num_layers):
            [(offset, length)] = memory.spans(layer, [block_id])
            expected[offset : offset + length] = contents[offset : offset + length]
    assert np.array_equal(tensor.cpu().numpy(), expected)
    blocks.close()
