"""Mistakes in kvferry's code, for tests of what finds mistakes: hunts and invariants.

They are the one purpose for which tests replace methods, private ones too: a mistake is where no seam is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_MISSING = object()


class Plant(Protocol):
    """Plants a mistake until the end of the test: a `planted` that is entered already."""

    def __call__(self, owner: Any, name: str, mistake: Any) -> None: ...


@contextmanager
def planted(owner: Any, name: str, mistake: Any) -> Iterator[None]:
    """Replace a method of a class, or a function of a module, by one with a mistake."""
    own = vars(owner).get(name, _MISSING)
    assert hasattr(owner, name), f"{owner} has no {name}, so that the mistake would change nothing"
    setattr(owner, name, mistake)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
