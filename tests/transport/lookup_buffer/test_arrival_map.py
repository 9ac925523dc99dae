"""Any layout's bytes, read into any other's: the logical tensor [tokens, heads, K then V] stays the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.blocks.sharding import on_rank, share, sources
from kvferry.transport.fabric.shm import copy_one_by_one
from kvferry.transport.lookup_buffer.base import Source, Want
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.lookup_buffer.selection import ArrivalMap, head_spans
from kvferry.transport.memory import BlockGeometry, LayerPlace, Region, RegionMap, join
from support.examples import examples

NUM_BLOCKS = 40


class Rank:
    """The memory of one rank, and what it means."""

    def __init__(self, layout: KVLayout, gap: int) -> None:
        """`gap`: bytes between blocks."""
        places, offset = [], 0
        for layer in range(layout.num_layers):
            stride = layout.span_bytes(layer) + gap
            places.append(LayerPlace(offset, stride))
            offset += NUM_BLOCKS * stride
        self.layout, self.geometry = layout, BlockGeometry(layout, NUM_BLOCKS, tuple(places))
        self.bytes = np.full(offset, 0xEE, np.uint8)

    def heads(self, layer: int, block_id: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """K [block_size, key_dim] and V [block_size, value_dim] of each head held, as views."""
        spec, place = self.layout.layers[layer], self.geometry.places[layer]
        start = place.offset + block_id * place.stride
        values = self.bytes[start : start + self.layout.span_bytes(layer)].view(np.float32)
        found = []
        for one in np.split(values, spec.num_kv_heads):
            key, value = np.split(one, [self.layout.block_size * spec.key_dim])
            size = self.layout.block_size
            found.append((key.reshape(size, spec.key_dim), value.reshape(size, spec.value_dim)))
        return found

    def write(self, tensors: list[np.ndarray], block_ids: list[int]) -> None:
        """Lay out [tokens, heads, key_dim + value_dim] by layer."""
        for layer, tensor in enumerate(tensors):
            for token in range(len(tensor)):
                self._at(layer, token, block_ids, tensor[token])

    def read(self, layer: int, num_tokens: int, block_ids: list[int], num_heads: int) -> np.ndarray:
        """What `write` lays out; heads of other ranks are zero."""
        spec = self.layout.layers[layer]
        tensor = np.zeros((num_tokens, num_heads, spec.key_dim + spec.value_dim), np.float32)
        for token in range(num_tokens):
            index, slot = divmod(token, self.layout.block_size)
            for number, (key, value) in enumerate(self.heads(layer, block_ids[index])):
                tensor[token, spec.first_kv_head + number] = np.concatenate([key[slot], value[slot]])
        return tensor

    def _at(self, layer: int, token: int, block_ids: list[int], values: np.ndarray) -> None:
        spec = self.layout.layers[layer]
        index, slot = divmod(token, self.layout.block_size)
        for number, (key, value) in enumerate(self.heads(layer, block_ids[index])):
            key[slot], value[slot] = np.split(values[spec.first_kv_head + number], [spec.key_dim])


def instance(tp_size: int, block_size: int, shapes: list[tuple[int, int, int]], whole: bool, gap: int) -> list[Rank]:
    layers = tuple(
        LayerLayout(heads if whole else max(1, heads // tp_size), key, value, total_kv_heads=heads)
        for heads, key, value in shapes
    )
    template = KVLayout(model_fingerprint="m", layers=layers, dtype="float32", block_size=block_size, tp_size=tp_size)
    return [Rank(on_rank(template, rank), gap) for rank in range(tp_size)]


def copy(source: Rank, target: Rank, remote: list[tuple[int, int]], local: list[tuple[int, int]]) -> None:
    theirs, ours = ([Region(rank.bytes.ctypes.data, rank.bytes.nbytes)] for rank in (source, target))
    copy_one_by_one(join(remote, RegionMap(theirs, "peer's"), local, RegionMap(ours, "own"), 2**20))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_the_logical_tensor_stays_the_same(data: st.DataObject) -> None:
    draw = data.draw
    cell, factor, larger_here = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4)), draw(st.booleans())
    sizes = (cell, cell * factor) if larger_here else (cell * factor, cell)
    tp_sizes = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1)]))
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    shapes = [(heads, draw(st.integers(1, 5)), draw(st.integers(0, 4))) for _ in range(draw(st.integers(1, 3)))]
    gap = draw(st.sampled_from([0, 4, 12]))
    theirs = instance(tp_sizes[0], sizes[0], shapes, draw(st.booleans()), gap)
    ours = instance(tp_sizes[1], sizes[1], shapes, draw(st.booleans()), 0)

    num_tokens = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors = [rng.random((num_tokens, heads, key + value), np.float32) for heads, key, value in shapes]
    their_ids = rng.permutation(NUM_BLOCKS)[: -(-num_tokens // sizes[0])].tolist()
    our_ids = rng.permutation(NUM_BLOCKS)[: -(-num_tokens // sizes[1])].tolist()
    skip = draw(st.integers(0, num_tokens // sizes[1]))
    for rank in theirs:
        rank.write(tensors, their_ids)
    for mine in ours:
        before = [mine.read(layer, skip * sizes[1], our_ids, shape[0]) for layer, shape in enumerate(shapes)]
        for number in sources(mine.layout, theirs[0].layout):
            fetch(theirs[number], mine, their_ids, our_ids, skip, draw(st.integers(1, 4)))
        for layer, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            spec = mine.layout.layers[layer]
            found = mine.read(layer, num_tokens, our_ids, shape[0])
            held = slice(spec.first_kv_head, spec.end_kv_head)
            assert np.array_equal(found[skip * sizes[1] :, held], tensor[skip * sizes[1] :, held])
            assert np.array_equal(found[: skip * sizes[1]], before[layer]), "what was here already is left alone"


def fetch(source: Rank, target: Rank, their_ids: list[int], our_ids: list[int], skip: int, step: int) -> None:
    """Read all parts, announced `step` blocks at a time, layer by layer."""
    arrivals = ArrivalMap(Want("k", Source("", 0), our_ids, 0.0, skip), source.geometry, target.geometry)
    for first in range(0, len(their_ids), step):
        for layer in range(source.layout.num_layers):
            part = Part(layer, 1, first, their_ids[first : first + step])
            arrivals.cover(part)
            copy(source, target, *arrivals.spans(part, layer))
    covered = min(len(their_ids) * source.layout.block_size, len(our_ids) * target.layout.block_size)
    assert arrivals.num_tokens() == covered


def test_equal_blocks_are_moved_whole_and_joined() -> None:
    [one] = instance(1, 4, [(8, 4, 4)], False, 0)
    size = one.layout.span_bytes(0)
    assert head_spans(one.geometry, 0, [3, 4, 5, 9], range(4), 4, range(8)) == [(3 * size, 3 * size), (9 * size, size)]


def test_a_range_of_heads_of_a_block_is_one_span() -> None:
    [one] = instance(1, 4, [(8, 4, 4)], False, 0)
    head = one.layout.head_bytes(0)
    assert head_spans(one.geometry, 0, [3, 4], range(2), 4, range(2, 6)) == [
        (3 * 8 * head + 2 * head, 4 * head),
        (4 * 8 * head + 2 * head, 4 * head),
    ]


def test_the_side_with_the_smaller_blocks_is_contiguous() -> None:
    [large] = instance(1, 32, [(8, 4, 4)], False, 0)
    [small] = instance(1, 16, [(8, 4, 4)], False, 0)
    assert len(head_spans(small.geometry, 0, [3, 4], range(2), 16, range(8))) == 1
    assert len(head_spans(large.geometry, 0, [3], range(2), 16, range(8))) == 2 * 2 * 8


def test_a_share_is_of_two_layouts_only() -> None:
    [one] = instance(1, 4, [(8, 4, 4)], False, 0)
    assert share(one.layout, one.layout).heads == (range(8),)


@pytest.mark.parametrize("heads", [range(0), range(3, 3)])
def test_no_heads_are_no_spans(heads: range) -> None:
    [one] = instance(1, 4, [(8, 4, 4)], False, 0)
    assert head_spans(one.geometry, 0, [3], range(1), 4, heads) == []
