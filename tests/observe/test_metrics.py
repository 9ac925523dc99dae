"""Helps of connectors' metrics."""

from __future__ import annotations

import pytest

from kvferry.observe.metrics import connector_help


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("taken", "Hand-offs that arrived completely and are used."),
        ("tier1_kept_bytes", "Bytes that are kept now (tier 1)."),
        ("1_tier0_late", "Operations that missed their deadline (tier 0, connector 1 of several)."),
        ("ended_taken", "Hand-offs whose keys ended at the producer, for the reason 'taken'."),
        ("novel", "Statistic 'novel' of the connector, which describes it."),
    ],
)
def test_a_help_is_a_sentence_that_says_where(name: str, text: str) -> None:
    assert connector_help(name) == text
