import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "support"), str(HERE.parent / "transport" / "support")]

from fake_engine import FakeEngine  # noqa: E402 - found through the line above
from kv_support import make_layout, no_leftovers  # noqa: E402

from kvferry.core.blocks.layout import KVLayout  # noqa: E402


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with no_leftovers():
        yield


@pytest.fixture
def layout() -> KVLayout:
    return make_layout(num_layers=2)


@pytest.fixture
def make_engine(layout: KVLayout) -> Iterator[Callable[..., FakeEngine]]:
    """Engines that are checked for leaks and closed in the end, unless the test did."""
    engines: list[FakeEngine] = []

    def make(connector: str, role: str = "kv_both", layout: KVLayout = layout, **options: object) -> FakeEngine:
        engines.append(FakeEngine(connector, layout, role, **options))
        return engines[-1]

    try:
        yield make
        for engine in engines:
            engine.check()
    finally:
        for engine in engines:
            engine.close()
