"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from support import warm


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of engines in this process start at once; for tests that are not about their start."""
    monkeypatch.setattr("kvferry.engine.executor.rank_process.start_process", warm.run_rank)
