import pytest
import torch

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import ConfigError
from kvferry.engine.blocks.kv_cache import KVCache, choose_num_blocks
from kvferry.transport.shared_memory import SharedSegment, owned_segment_names

LAYOUT = KVLayout(
    model_fingerprint="m", layers=(LayerLayout(2, 4, 4), LayerLayout(1, 8, 6)), dtype="float32", block_size=16
)
CPU = torch.device("cpu")


def test_a_block_of_a_layer_is_one_span_where_the_layout_says() -> None:
    cache = KVCache(LAYOUT, 5, CPU)
    for layer, tensor in enumerate(cache.layers):
        assert tensor.shape == (5, LAYOUT.layers[layer].num_kv_heads, tensor.shape[2])
        assert tensor[3].is_contiguous()
        assert tensor[3].nbytes == LAYOUT.span_bytes(layer)
        [(offset, length)] = cache.memory.spans(layer, [3])
        assert tensor[3].data_ptr() == cache.memory.regions[0].address + offset
        assert length == tensor[3].nbytes
    cache.close()


def test_another_process_could_read_it_through_the_segment() -> None:
    cache = KVCache(LAYOUT, 3, CPU)
    cache.layers[1][2].fill_(7.0)
    segment = cache.memory.regions[0].segment
    assert segment is not None
    other = SharedSegment.attach(segment)
    [(offset, length)] = cache.memory.spans(1, [2])
    seen = torch.frombuffer(bytearray(other.buffer[offset : offset + length]), dtype=torch.float32)
    assert torch.equal(seen, torch.full_like(seen, 7.0))
    other.close()
    cache.close()
    assert segment not in owned_segment_names()


def test_the_asked_for_size_is_kept_and_too_little_is_explained() -> None:
    assert choose_num_blocks(LAYOUT, CPU, 10 * LAYOUT.block_bytes + 1, 10**9) == 10
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        choose_num_blocks(LAYOUT, CPU, LAYOUT.block_bytes, 10**9)


def test_without_a_size_no_more_than_useful_is_taken() -> None:
    assert choose_num_blocks(LAYOUT, CPU, None, 100) == 7
