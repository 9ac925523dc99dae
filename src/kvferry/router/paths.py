"""The paths that clients may ask for. Everything else is 404, whatever the instances behind would answer: engines have
administration beside their API (vLLM's /sleep, /v1/load_lora_adapter), which is not for clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

from kvferry.core.errors import ConfigError
from kvferry.core.messages.openai import UnknownRoute
from kvferry.http.errors import MethodNotAllowed

PROMPT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""The paths that can be split over two instances, and where each has its prompt."""

JSON_PATHS = (
    *PROMPT_FIELDS,
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)
"""POST with a JSON object."""

READ_PATHS = ("/v1/models", "/v1/models/*", "/version", "/openapi.json")
"""GET. `*` at the end is one or more segments: a model's name may have slashes."""


@dataclass(frozen=True)
class PublicPath:
    """One of them. `takes_forms`: multipart/form-data goes through beside JSON, undecoded."""

    methods: frozenset[str]
    takes_forms: bool = False


class PublicPaths:
    """Which requests are for the instances."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        """`more` are `--forward-path`s, as `parse_path` reads them. Raises `ConfigError`."""
        known = {path: PublicPath(frozenset({"POST"})) for path in JSON_PATHS}
        known |= {path: PublicPath(frozenset({"GET", "HEAD"})) for path in READ_PATHS}
        for method, path in map(parse_path, more):
            before = known[path].methods if path in known else frozenset[str]()
            known[path] = PublicPath(before | {method}, takes_forms=path not in JSON_PATHS)
        self._exact: Mapping[str, PublicPath] = MappingProxyType(
            {path: one for path, one in known.items() if not path.endswith("/*")}
        )
        self._below = {path.removesuffix("*"): one for path, one in known.items() if path.endswith("/*")}

    def find(self, method: str, path: str) -> PublicPath:
        """`path` as the client wrote it, still percent-encoded. Raises `UnknownRoute` and `MethodNotAllowed`."""
        found = self._exact.get(path) or self._find_below(path)
        if found is None:
            raise UnknownRoute(f"there is no {path[:200]!r} here")
        if method not in found.methods:
            raise MethodNotAllowed(method[:20], path[:200], tuple(sorted(found.methods)))
        return found

    def _find_below(self, path: str) -> PublicPath | None:
        for prefix, found in self._below.items():
            if path.startswith(prefix) and _is_plain(path.removeprefix(prefix)):
                return found
        return None


def parse_path(text: str) -> tuple[str, str]:
    """Method and path of a `--forward-path` such as `POST /v1/audio/transcriptions`. Raises `ConfigError`."""
    method, _, path = text.strip().partition(" ")
    path = path.strip()
    if method not in ("GET", "POST", "PUT", "PATCH", "DELETE") or not _is_path(path):
        raise ConfigError(
            f"--forward-path {text!r} is not a method and a path; write it as 'POST /v1/audio/transcriptions'"
        )
    if path.startswith("/kvferry"):
        raise ConfigError(f"--forward-path {text!r}: /kvferry is between the router and its instances")
    return method, path


def _is_path(path: str) -> bool:
    return path.startswith("/") and len(path) > 1 and _is_plain(path[1:].removesuffix("/*"))


def _is_plain(rest: str) -> bool:
    """Whether it says the same to everyone: no empty segment, none that goes up, in any spelling."""
    decoded = unquote_to_bytes(rest)
    if any(byte < 33 or byte in b"\x7f\\?#" for byte in decoded) or b"%" in decoded:
        return False
    return all(segment not in (b"", b".", b"..") for segment in decoded.split(b"/"))
