"""Planted mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.planted import Plant, planted


@pytest.fixture
def plant() -> Iterator[Plant]:
    """`plant(owner, name, mistake)`: replaces a method or function until the end of the test."""
    with ExitStack() as mistakes:
        yield lambda owner, name, mistake: mistakes.enter_context(planted(owner, name, mistake))
