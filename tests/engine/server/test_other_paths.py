"""Paths of other servers."""

from __future__ import annotations

import httpx
import pytest

from kvferry.engine.server.other_paths import explain_path


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/audio/transcriptions", "speech"),
        ("/v1/completions/render", "render"),
        ("/v1/tokenize", "/tokenize"),
        ("/generate", "/v1/completions"),
    ],
)
def test_a_404_names_what_serves_the_path(base_url: str, path: str, remedy: str) -> None:
    response = httpx.post(base_url.removesuffix("/v1") + path, json={})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"].startswith(f"{path} is not served by kvferry's engine: ")
    assert remedy in error["message"]
    assert error.get("code", "unknown_url") == "unknown_url"  # Anthropic's errors have no code


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/respond", "*", "/nothing"])
def test_other_unknown_paths_are_invalid(path: str) -> None:
    assert explain_path(path) is None
