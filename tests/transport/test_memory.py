import numpy as np
import pytest
from kv_support import BlockRegion, make_layout

from kvferry.core.errors import ProtocolError
from kvferry.transport.memory import BlockGeometry, BlockMemory, LayerPlace, Region, RegionMap, columns


def test_a_span_is_one_block_of_one_layer() -> None:
    layout = make_layout(num_layers=2)
    geometry = BlockGeometry.dense(layout, 10)
    assert geometry.span_sizes == (layout.span_bytes(0), layout.span_bytes(1))
    assert geometry.spans(1, [3]) == [(10 * layout.span_bytes(0) + 3 * layout.span_bytes(1), layout.span_bytes(1))]
    assert BlockMemory.dense(layout, 10, 0).num_bytes == 10 * layout.block_bytes


def test_neighbours_are_joined_and_order_is_kept() -> None:
    layout = make_layout()
    size = layout.span_bytes(0)
    geometry = BlockGeometry.dense(layout, 16)
    assert geometry.spans(0, [4, 5, 6, 2, 3, 9]) == [(4 * size, 3 * size), (2 * size, 2 * size), (9 * size, size)]
    assert geometry.spans(0, []) == []


def test_blocks_that_lie_apart_are_not_joined() -> None:
    layout = make_layout(num_layers=2)
    sizes = [layout.span_bytes(layer) for layer in range(2)]
    stride = layout.block_bytes
    geometry = BlockGeometry(layout, 8, (LayerPlace(0, stride), LayerPlace(sizes[0], stride)))
    assert geometry.spans(1, [2, 3]) == [(sizes[0] + 2 * stride, sizes[1]), (sizes[0] + 3 * stride, sizes[1])]


def test_offsets_count_through_all_regions() -> None:
    places = RegionMap([Region(1000, 10), Region(5000, 20)], "own")
    assert places.num_bytes == 30
    assert places.locate(*columns([(0, 10), (9, 1), (10, 20)])).tolist() == [1000, 1009, 5000]
    for span in [(-1, 1), (0, 0), (5, 10), (29, 2), (30, 1)]:
        with pytest.raises(ProtocolError, match="outside"):
            places.locate(*columns([span]))


@pytest.mark.parametrize(
    "regions", [[(0, -1)], [(-1, 8)], [(0, 8), (8, -4)], [(2**63, 8)], [(0, 2**63)], [(0, 2**61)] * 5], ids=str
)
def test_regions_that_no_memory_has(regions: list[tuple[int, int]]) -> None:
    """As a peer may describe its own."""
    with pytest.raises(ProtocolError, match="the peer's regions"):
        RegionMap([Region(address, num_bytes) for address, num_bytes in regions], "peer's")


def test_a_view_is_the_memory(make_region) -> None:
    region: BlockRegion = make_region(4, seed=1)
    view = region.memory.view((3, 10))
    view[2] = view[2] ^ 0xFF
    assert bytes(view) == region.bytes[3:13].tobytes()


@pytest.mark.parametrize("is_dense", [True, False])
def test_views_of_blocks_are_what_their_spans_say(make_region, *, is_dense: bool) -> None:
    region: BlockRegion = make_region(8, seed=1)
    memory, layout = region.memory, region.memory.layout
    if not is_dense:
        starts = [sum(map(layout.span_bytes, range(layer))) for layer in range(layout.num_layers)]
        geometry = BlockGeometry(layout, 8, tuple(LayerPlace(start, layout.block_bytes) for start in starts))
        memory = BlockMemory(geometry, memory.regions)
    for layer in range(layout.num_layers):
        views = memory.block_views(layer, [5, 0, 6, 7])
        assert [bytes(view) for view in views] == [
            bytes(memory.view(memory.spans(layer, [block_id])[0])) for block_id in [5, 0, 6, 7]
        ]
        views[1][:] = b"\x07" * len(views[1])
        assert bytes(memory.view(memory.spans(layer, [0])[0])) == bytes(views[1])
    assert memory.block_views(0, []) == []


def test_views_of_blocks_that_are_not_there(make_region) -> None:
    memory = make_region(4, seed=1).memory
    with pytest.raises(ProtocolError, match="outside"):
        memory.block_views(memory.layout.num_layers - 1, [3, 4])


def test_layers_in_regions_of_their_own() -> None:
    layout = make_layout(num_layers=2)
    buffers = [np.full(4 * layout.span_bytes(layer), layer, np.uint8) for layer in range(2)]
    regions = tuple(Region(buffer.ctypes.data, buffer.nbytes) for buffer in buffers)
    sizes = [layout.span_bytes(layer) for layer in range(2)]
    places = (LayerPlace(0, sizes[0]), LayerPlace(buffers[0].nbytes, sizes[1]))
    memory = BlockMemory(BlockGeometry(layout, 4, places), regions)
    [span] = memory.spans(1, [3])
    memory.view(span)[:] = b"\x07" * span[1]
    assert (buffers[0] == 0).all()
    assert (buffers[1][: -span[1]] == 1).all()
    assert (buffers[1][-span[1] :] == 7).all()
