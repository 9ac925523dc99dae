"""The benchmarks are programs beside the package; their modules are found where they are.

Not by `sys.path`: `benchmarks/router.py` would then hide the folder `tests/router`, whose helpers tests import.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"
NAMES = {path.stem for path in BENCHMARKS.iterdir()} - {path.stem for path in TESTS.iterdir()}


class BenchmarksFinder(PathFinder):
    """Finds the modules of the benchmarks, but for those that are named as a folder of the tests."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module `fullname` if it is one of the benchmarks' own."""
        return super().find_spec(fullname, [str(BENCHMARKS)], target) if path is None and fullname in NAMES else None


sys.meta_path.append(BenchmarksFinder)
