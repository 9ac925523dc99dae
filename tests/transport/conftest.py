import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from kv_support import BlockRegion, make_layout, no_leftovers

from kvferry.core.blocks.layout import KVLayout


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with no_leftovers():
        yield


@pytest.fixture
def layout() -> KVLayout:
    return make_layout()


@pytest.fixture
def make_region(layout: KVLayout) -> Iterator[Callable[..., BlockRegion]]:
    regions: list[BlockRegion] = []

    def make(num_blocks: int = 16, seed: int | None = None, layout: KVLayout = layout) -> BlockRegion:
        regions.append(BlockRegion(layout, num_blocks, seed))
        return regions[-1]

    yield make
    for region in regions:
        region.close()
