import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "transport" / "support"), str(Path(__file__).parent / "support")]

from kv_support import make_layout, no_leftovers  # noqa: E402 - found through the line above

from kvferry.core.blocks.layout import KVLayout  # noqa: E402


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with no_leftovers():
        yield


@pytest.fixture
def layout() -> KVLayout:
    return make_layout()
