"""What mkdocs asks for while it builds the site: pages made from the code, and those that lie beside docs/."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs_site import api, commands, connectors, environment, metrics, repository, spec

GENERATED = {
    "reference/commands.md": commands.page,
    "reference/spec.md": spec.page,
    "reference/kv-transfer-config.md": connectors.page,
    "reference/environment.md": environment.page,
    "reference/metrics.md": metrics.page,
}


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
    return repository.with_links(markdown, page.file.src_uri)
