"""Modules whose attributes do nothing, in place of packages that other engines import at start and that have no build
for a machine without an accelerator on PyPI. The install scripts of these engines copy this file into their
environments; kvferry itself never imports it.

A `.pth` file imports it in each Python process. It stands in for the packages that `KVFERRY_STAND_INS` names, separated
by spaces, and for none without that variable. A package that is installed is imported all the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Attribute(type):
    """An attribute of a stand-in: a class that can be inherited from, called and iterated, and has any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _StandIn(ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(name, (), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last of the finders: a package that is installed is imported."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] not in self._names or _is_only_asked_for():
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _is_only_asked_for() -> bool:
    """Called by `importlib.util.find_spec`, with which transformers looks which packages there are."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_filename == importlib.util.__file__:
            return True
        frame = frame.f_back
    return False


def stand_in(names: Collection[str]) -> None:
    """Stand in for these packages in this process."""
    if names:
        sys.meta_path.append(_StandInFinder(names))


stand_in(os.environ.get("KVFERRY_STAND_INS", "").split())
