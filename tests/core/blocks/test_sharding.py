"""Every head comes once to each rank that holds it, and every rank of the producer is rid of its blocks."""

from itertools import product

import msgspec
import pytest

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.blocks.sharding import on_rank, orphans, require_ordered, share, sources
from kvferry.core.errors import LayoutMismatch

HEADS = (1, 2, 3, 4, 8)


def instance(tp_size: int, *num_heads: int, whole: bool = False) -> list[KVLayout]:
    """The layouts of all ranks. With `whole`, every rank has every head."""

    def layer(total: int) -> LayerLayout:
        return LayerLayout(total if whole else max(1, total // tp_size), 4, 2, total_kv_heads=total)

    template = KVLayout(
        model_fingerprint="m", layers=tuple(map(layer, num_heads)), dtype="float32", block_size=8, tp_size=tp_size
    )
    return [on_rank(template, rank) for rank in range(tp_size)]


def cases() -> list[tuple[list[KVLayout], list[KVLayout]]]:
    sizes = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4), (1, 3), (3, 1), (8, 2)]
    found = []
    for (theirs, ours), heads, (one, other) in product(sizes, HEADS, product([False, True], repeat=2)):
        if all(max(heads, size) % min(heads, size) == 0 for size in (theirs, ours)):
            found.append((instance(theirs, heads, whole=one), instance(ours, heads, whole=other)))
    return found


def test_heads_lie_on_ranks_in_order() -> None:
    assert [layout.layers[0].first_kv_head for layout in instance(4, 8)] == [0, 2, 4, 6]
    assert [layout.layers[0].first_kv_head for layout in instance(4, 2)] == [0, 0, 1, 1]
    assert [layout.layers[0].first_kv_head for layout in instance(4, 2, whole=True)] == [0, 0, 0, 0]


@pytest.mark.parametrize(("theirs", "ours"), cases())
def test_each_rank_gets_each_of_its_heads_once(theirs: list[KVLayout], ours: list[KVLayout]) -> None:
    for mine in ours:
        heads = [
            head
            for rank in sources(mine, theirs[0])
            for head in share(mine, theirs[rank]).heads[0]
            if head in range(theirs[rank].layers[0].first_kv_head, theirs[rank].layers[0].end_kv_head)
        ]
        layer = mine.layers[0]
        assert sorted(heads) == list(range(layer.first_kv_head, layer.end_kv_head))


@pytest.mark.parametrize(("theirs", "ours"), cases())
def test_each_producer_rank_knows_when_all_have_taken(theirs: list[KVLayout], ours: list[KVLayout]) -> None:
    released = [rank for mine in ours for rank in orphans(mine, theirs[-1])]
    for rank, layout in enumerate(theirs):
        shares = [share(mine, layout) for mine in ours if rank in sources(mine, theirs[0])]
        assert [found.reader for found in shares] == list(range(len(shares)))
        assert {found.num_readers for found in shares} <= {len(shares)}
        assert released.count(rank) == (0 if shares else 1)


@pytest.mark.parametrize(("theirs", "ours"), cases())
def test_no_more_ranks_are_read_than_needed(theirs: list[KVLayout], ours: list[KVLayout]) -> None:
    for mine in ours:
        if len(theirs) == len(ours) and mine.layers == theirs[mine.tp_rank].layers:
            assert sources(mine, theirs[0]) == (mine.tp_rank,)
        layer = theirs[0].layers[0]
        assert len(sources(mine, theirs[0])) == -(-mine.layers[0].num_kv_heads // layer.num_kv_heads)


def test_layers_may_lie_differently() -> None:
    """Split heads in one layer, one head for all ranks in the other."""
    theirs, [mine] = instance(2, 4, 1), instance(1, 4, 1)
    assert sources(mine, theirs[1]) == (0, 1)
    assert share(mine, theirs[0]).heads == (range(2), range(1))
    assert [list(heads) for heads in share(mine, theirs[1]).heads] == [[2, 3], []]


def test_readers_of_copies_spread() -> None:
    theirs, ours = instance(4, 1), instance(4, 1)
    assert [sources(mine, theirs[0]) for mine in ours] == [(0,), (1,), (2,), (3,)]
    [alone] = instance(1, 1)
    assert sources(alone, theirs[0]) == (0,)
    assert orphans(alone, theirs[0]) == (1, 2, 3)


def test_a_rank_that_is_not_read_is_no_source() -> None:
    [alone] = instance(1, 1)
    with pytest.raises(LayoutMismatch, match="tp_rank"):
        share(alone, instance(4, 1)[2])


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("tp_rank", msgspec.structs.replace(instance(2, 4)[0], tp_rank=2)),
        ("layers[0].first_kv_head", msgspec.structs.replace(instance(2, 4)[0], tp_rank=1)),
        (
            "layers[0].num_kv_heads",
            msgspec.structs.replace(instance(2, 4)[0], layers=(LayerLayout(3, 4, 2, total_kv_heads=4),)),
        ),
    ],
)
def test_heads_in_no_known_order_are_refused(field: str, layout: KVLayout) -> None:
    with pytest.raises(LayoutMismatch) as refused:
        require_ordered(layout)
    assert refused.value.field == field


def test_spans_without_meaning_are_read_from_the_same_rank() -> None:
    layer = LayerLayout(1, 4, 2, 1000, 1, 2)
    mine = KVLayout(
        model_fingerprint="m", layers=(layer,), dtype="float32", block_size=8, packing="x", tp_size=2, tp_rank=1
    )
    assert sources(mine, mine) == (1,)
    assert (share(mine, mine).reader, share(mine, mine).num_readers) == (0, 1)
    assert orphans(mine, mine) == ()
