"""The optional library of grammars, without importing it."""

from __future__ import annotations

from kvferry.core.dependencies import require_library
from kvferry.core.errors import MissingDependency


def require_llguidance() -> None:
    """Raise `MissingDependency` unless llguidance is installed."""
    require_library("structured output", "llguidance", "structured", ["llguidance"])


def can_constrain() -> bool:
    """True if this process can constrain answers."""
    try:
        require_llguidance()
    except MissingDependency:
        return False
    return True
