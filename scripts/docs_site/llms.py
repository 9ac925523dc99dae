"""llms.txt: the pages of the site for programs that read it, as https://llmstxt.org describes the file. Each page is in
the site as Markdown too, under the address of its HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OTHER = re.compile(r"[#|!<>-]|\d+\.")
"""How headings, tables, pictures and lists begin."""
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def text(name: str, description: str, nav: Sequence[Mapping[str, Any]], pages: Mapping[str, str]) -> str:
    """The file. `nav`: as in mkdocs.yml; `pages`: Markdown by the place in the site."""
    lines = [f"# {name}", "", f"> {description}"]
    for entry in nav:
        for title, content in entry.items():
            lines += ["", f"## {title}", ""]
            lines += [
                f"- [{page}]({place}): {summary(pages[place])}"
                for page, place in _entries(title, content)
                if place in pages
            ]
    return "\n".join(lines) + "\n"


def places(nav: Sequence[Mapping[str, Any]]) -> list[str]:
    """The places of all pages of a navigation, in its order."""
    return [place for entry in nav for title, content in entry.items() for _, place in _entries(title, content)]


def summary(markdown: str) -> str:
    """The first sentence of a page."""
    without_code = re.sub(r"^(```|~~~).*?^\1$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraphs = (" ".join(paragraph.split()) for paragraph in without_code.split("\n\n"))
    prose = next((paragraph for paragraph in paragraphs if paragraph and not _OTHER.match(paragraph)), "")
    plain = _LINK.sub(r"\1", prose).replace("**", "").replace("*", "").replace("`", "")
    return re.split(r"(?<=\.)\s", plain, maxsplit=1)[0].rstrip(":")


def _entries(title: str, content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield title, content
        return
    for entry in content:
        yield from entry.items()
