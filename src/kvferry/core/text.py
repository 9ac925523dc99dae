"""Texts of clients, peers and libraries, as they are put into messages."""

from __future__ import annotations


def shortened(text: str, max_characters: int) -> str:
    """The text, cut at `max_characters`; an ellipsis is then its last character."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"
