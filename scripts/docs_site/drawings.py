"""Drawings in the site: part of the page, so that they have its colours, and scroll on a phone."""

from __future__ import annotations

import re

from docs_site.repository import ROOT

_IMAGE = re.compile(r'<img [^>]*src="(?:[^"]*/)?images/([\w-]+)\.svg"[^>]*>')
_MARK = 'class="kv-drawing"'


def with_drawings(html: str) -> str:
    """The page's HTML, in which each drawing of `scripts/diagrams.py` replaces its picture."""
    return _IMAGE.sub(_drawing, html)


def _drawing(image: re.Match[str]) -> str:
    svg = (ROOT / "docs" / "images" / f"{image[1]}.svg").read_text()
    return f'<span class="kv-frame">{svg}</span>' if _MARK in svg[:200] else image[0]
