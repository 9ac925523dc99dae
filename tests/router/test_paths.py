"""Paths that clients may request: by their exact text, and none that servers read differently."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.messages.openai import UnknownRoute
from kvferry.http.errors import MethodNotAllowed
from kvferry.router.paths import PublicPaths, parse_path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models/org/name"),
        ("GET", "/v1/models/org%2Fname"),
        ("POST", "/v1/audio/transcriptions"),
    ],
)
def test_paths_of_the_api_are_public(method: str, path: str) -> None:
    assert method in PublicPaths().find(method, path).methods


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/v1/load_lora_adapter", "/kvferry/release", "/v1/models/", "/v1/models//x", "/v1/models/../sleep"),
        *(
            "/v1/models/%2e%2e/sleep",
            "/v1/models/a%2F..%2Fsleep",
            "/v1/models/a%25b",
            "/v1/models/a%3Fb",
            "/v1/models/a%00",
        ),
        *("/v1/chat/completions/", "/V1/models", "/v1/models/a%5Cb", ""),
    ],
)
def test_all_others_are_not(path: str) -> None:
    with pytest.raises(UnknownRoute):
        PublicPaths().find("GET", path)


def test_another_method_is_told_which_there_are() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        PublicPaths().find("DELETE", "/v1/models")
    assert caught.value.allowed == ("GET", "HEAD")


def test_more_paths_may_be_forwarded() -> None:
    paths = PublicPaths(["POST /v1/custom", "DELETE /v1/chat/completions", "GET /files/*"])
    assert paths.find("POST", "/v1/custom").takes_forms
    both = paths.find("DELETE", "/v1/chat/completions")
    assert both.methods == {"POST", "DELETE"}
    assert not both.takes_forms
    assert paths.find("GET", "/files/a/b").methods == {"GET"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a method and a path"),
        ("/v1/x", "is not a method and a path"),
        ("get /v1/x", "is not a method and a path"),
        ("OPTIONS /v1/x", "is not a method and a path"),
        ("GET /", "is not a method and a path"),
        ("GET /a/../b", "is not a method and a path"),
        ("GET /a?b", "is not a method and a path"),
        ("GET /a b", "is not a method and a path"),
        ("POST /kvferry/x", "the router and its instances use them"),
    ],
)
def test_what_is_no_path_is_refused(text: str, says: str) -> None:
    assert parse_path(" POST  /v1/x ") == ("POST", "/v1/x")
    with pytest.raises(ConfigError, match=says):
        parse_path(text)
