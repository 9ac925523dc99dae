"""What mkdocs asks for while it builds the site: pages made from the code, and those that lie beside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs_site import api, commands, connectors, drawings, environment, llms, metrics, repository, spec, vllm_api

GENERATED = {
    "reference/commands.md": commands.page,
    "reference/spec.md": spec.page,
    "reference/kv-transfer-config.md": connectors.page,
    "reference/environment.md": environment.page,
    "reference/metrics.md": metrics.page,
    "reference/vllm-api.md": vllm_api.page,
}


_markdown: dict[str, str] = {}
"""The pages of this build by their place in the site."""


def on_files(files: Files, config: MkDocsConfig, **more: Any) -> Files:
    """Add what is not in docs/."""
    for place, make in GENERATED.items():
        files.append(File.generated(config, place, content=make()))
    for place, text in api.pages():
        files.append(File.generated(config, place, content=text))
    for place, path in [*repository.PAGES.items(), *repository.linked_files()]:
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **more: Any) -> str:
    """Links to files of the repository lead to their place in the site."""
    _markdown[page.file.src_uri] = text = repository.with_links(markdown, page.file.src_uri)
    return text


def on_page_content(html: str, **more: Any) -> str:
    """Drawings become part of the page."""
    return drawings.with_drawings(html)


def on_post_build(config: MkDocsConfig, **more: Any) -> None:
    """Write llms.txt, and each page as Markdown."""
    site = Path(config.site_dir)
    for place, text in _markdown.items():
        (site / place).write_text(text)
    (site / "llms.txt").write_text(
        llms.text(config.site_name, config.site_description or "", config.nav or [], _markdown)
    )
