"""Checks that optional packages are installed, without importing them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from kvferry.core.errors import MissingDependency


def require_library(feature: str, package: str, extra: str, modules: Sequence[str]) -> None:
    """Raise `MissingDependency` unless one of `modules`, which `package` provides, is installed. `feature` needs it."""
    if not any(_is_installed(module) for module in modules):
        raise MissingDependency(feature, package, extra)


def _is_installed(module: str) -> bool:
    # A folder of that name somewhere on the path is a namespace package, which has no origin.
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
