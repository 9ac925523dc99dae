"""The repository's pages that are not in docs/, and the links between all pages.

In the files, links work where the files lie, as on a code host; in the site they lead to where the target is there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "index.md": ROOT / "README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "security.md": ROOT / "SECURITY.md",
    "benchmarks.md": ROOT / "benchmarks/README.md",
}
"""Place in the site → file."""

LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"^(```.*?^```|~~~.*?^~~~)", re.MULTILINE | re.DOTALL)


def with_links(markdown: str, place: str) -> str:
    """The text of the page at `place`, its links to other files of the repository changed to where those are here."""
    home = _source(place).parent
    parts = _FENCED.split(markdown)
    return "".join(
        part if index % 2 else LINK.sub(lambda link: _moved(link, home, place), part)
        for index, part in enumerate(parts)
    )


def linked_files() -> Iterator[tuple[str, Path]]:
    """Files that pages link to and that are no pages: pictures, examples."""
    found: dict[str, Path] = {}
    pages = [*PAGES.values(), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link, _ in LINK.findall(page.read_text()):
            path = (page.parent / link).resolve() if "://" not in link else ROOT
            if path.is_file() and path.suffix != ".md" and ROOT / "docs" not in path.parents:
                found[str(path.relative_to(ROOT))] = path
    yield from found.items()


def _moved(link: re.Match[str], home: Path, place: str) -> str:
    path, anchor = link[1], link[2] or ""
    if "://" in path or path.startswith("mailto:"):
        return link[0]
    target = _place((home / path).resolve())
    return link[0] if target is None else posixpath.relpath(target, posixpath.dirname(place) or ".") + anchor


def _source(place: str) -> Path:
    return PAGES.get(place, ROOT / "docs" / place)


def _place(path: Path) -> str | None:
    """Where a file of the repository is in the site; None: nowhere."""
    for place, page in PAGES.items():
        if path == page or (path == page.parent and page.name == "README.md" and page.parent != ROOT):
            return place
    if ROOT / "docs" in path.parents:
        return str(path.relative_to(ROOT / "docs"))
    return str(path.relative_to(ROOT)) if path.is_file() and ROOT in path.parents else None
