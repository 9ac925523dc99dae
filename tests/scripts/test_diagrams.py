"""The pictures of the docs: those that are drawn are as their script draws them, and guides have one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import diagrams
from docs_site.drawings import with_drawings
from docs_site.repository import PAGES
from drawing import DARK, LIGHT, Drawing, variables
from kvferry.models.catalog import resolve

ROOT = Path(__file__).parents[2]
NOTHING_TO_SHOW = {"clients.md", "models.md", "messages.md", "responses.md", "gpu.md"}
"""Guides of tables and fields, which have nothing in space or time to show."""


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_each_file_is_as_it_is_drawn(name: str) -> None:
    assert (diagrams.FOLDER / f"{name}.svg").read_text() == diagrams.DIAGRAMS[name]().svg()


def guides() -> Iterator[str]:
    """The pages under Start, Serve and Operate."""
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    for section in yaml.safe_load(text)["nav"]:
        for title, pages in section.items():
            if title in ("Start", "Serve", "Operate"):
                yield from (page for entry in pages for page in entry.values())


@pytest.mark.parametrize("page", list(guides()))
def test_guides_have_a_picture(page: str) -> None:
    text = PAGES.get(page, ROOT / "docs" / page).read_text()
    has_picture = re.search(r"!\[[^\]]+\]\([^)]+\.(?:svg|png)\)", text) is not None
    assert has_picture == (page not in NOTHING_TO_SHOW), (
        "draw one in scripts/diagrams.py, or name the page in NOTHING_TO_SHOW"
    )


def test_drawings_have_the_colours_of_the_site() -> None:
    css = (ROOT / "docs" / "stylesheets" / "site.css").read_text()
    for scheme, colours in (("default", LIGHT), ("slate", DARK)):
        assert f'[data-md-color-scheme="{scheme}"] .kv-drawing {{ {variables(colours)} }}' in css


def test_drawings_become_part_of_a_page_and_other_pictures_do_not() -> None:
    page = '<p><img alt="a" src="../images/fleet.svg" /> <img alt="b" src="images/demo.svg"></p>'
    html = with_drawings(page)
    assert html.startswith('<p><span class="kv-frame"><svg')
    assert html.endswith('<img alt="b" src="images/demo.svg"></p>')


def test_text_that_leaves_its_place_is_an_error() -> None:
    drawing = Drawing("a", 100)
    with pytest.raises(ValueError, match="leaves the drawing"):
        drawing.text(700, 50, "too long")
    with pytest.raises(ValueError, match="wider than its box"):
        drawing.box(10, 10, 40, 20, "too long for it")


def test_the_mask_in_the_drawing_is_llguidances() -> None:
    llguidance: Any = pytest.importorskip("llguidance")
    from llguidance import numpy as masks
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(resolve("kvferry/tiny-python")))
    tokens = from_tokenizer(tokenizer)
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_regex(diagrams.REGEX))
    ids, counts = tokenizer.encode("packs = 100", add_special_tokens=False), []
    for token in [*ids, None]:
        mask = masks.allocate_token_bitmask(1, tokens.vocab_size)
        masks.fill_next_token_bitmask(matcher, mask, 0)
        counts.append(sum(int(word).bit_count() for word in mask.view("uint32").flat))
        if token is not None:
            matcher.consume_token(token)
    assert tokens.vocab_size == diagrams.NUM_TOKENS
    assert list(zip([*map(tokenizer.decode, ids), "end"], counts, strict=True)) == list(diagrams.MASKS)
