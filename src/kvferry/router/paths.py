"""The paths that clients may request. All others are 404, even if instances serve them: engines have administration
paths beside their API (vLLM's /sleep, /v1/load_lora_adapter), which are not for clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

from kvferry.api.dialects.translator import TRANSLATED_PATHS
from kvferry.core.errors import ConfigError
from kvferry.core.messages.openai import UnknownRoute
from kvferry.http.errors import MethodNotAllowed

PROMPT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""The paths whose requests can be split over two instances, and the field with the prompt."""

JSON_PATHS = (
    *PROMPT_FIELDS,
    *TRANSLATED_PATHS,
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/audio/speech",
)
"""POST with a JSON object."""

FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""POST with a form that contains a file."""

READ_PATHS = ("/v1/models", "/v1/models/*", "/version", "/openapi.json", "/ping", "/load", "/tokenizer_info")
"""GET and HEAD. `*` at the end stands for one or more segments: a model's name may have slashes."""


@dataclass(frozen=True)
class PublicPath:
    """A public path. `takes_forms`: multipart/form-data is forwarded undecoded, beside JSON."""

    methods: frozenset[str]
    takes_forms: bool = False


class PublicPaths:
    """The paths whose requests are forwarded to instances."""

    def __init__(self, extra_paths: Iterable[str] = ()) -> None:
        """`extra_paths` are `--forward-path`s, as `parse_path` reads them. Raises `ConfigError`."""
        paths = {path: PublicPath(frozenset({"POST"})) for path in JSON_PATHS}
        paths |= {path: PublicPath(frozenset({"POST"}), takes_forms=True) for path in FORM_PATHS}
        paths |= {path: PublicPath(frozenset({"GET", "HEAD"})) for path in READ_PATHS}
        for method, path in map(parse_path, extra_paths):
            methods = paths[path].methods if path in paths else frozenset[str]()
            paths[path] = PublicPath(methods | {method}, takes_forms=path not in JSON_PATHS)
        self._exact: Mapping[str, PublicPath] = MappingProxyType(
            {path: public_path for path, public_path in paths.items() if not path.endswith("/*")}
        )
        self._by_prefix = {
            path.removesuffix("*"): public_path for path, public_path in paths.items() if path.endswith("/*")
        }

    def find(self, method: str, path: str) -> PublicPath:
        """Find the public path. `path`: as the client wrote it, still percent-encoded. Raises `UnknownRoute` and
        `MethodNotAllowed`."""
        public_path = self._exact.get(path) or self._find_by_prefix(path)
        if public_path is None:
            raise UnknownRoute(f"there is no {path[:200]!r} here")
        if method not in public_path.methods:
            raise MethodNotAllowed(method[:20], path[:200], tuple(sorted(public_path.methods)))
        return public_path

    def _find_by_prefix(self, path: str) -> PublicPath | None:
        for prefix, public_path in self._by_prefix.items():
            if path.startswith(prefix) and _is_plain(path.removeprefix(prefix)):
                return public_path
        return None


def parse_path(text: str) -> tuple[str, str]:
    """Parse a `--forward-path` such as `POST /v1/audio/transcriptions`. Raises `ConfigError`."""
    method, _, path = text.strip().partition(" ")
    path = path.strip()
    if method not in ("GET", "POST", "PUT", "PATCH", "DELETE") or not _is_path(path):
        raise ConfigError(
            f"--forward-path {text!r} is not a method and a path; write it as 'POST /v1/audio/transcriptions'"
        )
    if path.startswith("/kvferry"):
        raise ConfigError(
            f"--forward-path {text!r}: paths below /kvferry are not for clients; the router and its instances use them"
        )
    return method, path


def _is_path(path: str) -> bool:
    return path.startswith("/") and len(path) > 1 and _is_plain(path[1:].removesuffix("/*"))


def _is_plain(subpath: str) -> bool:
    """True if every server reads this part of a path alike. It has no empty segment, no `.` or `..`, no control
    character, space, `\\`, `?` or `#`, not even percent-encoded, and is not encoded twice."""
    decoded = unquote_to_bytes(subpath)
    if any(byte < 33 or byte in b"\x7f\\?#" for byte in decoded) or b"%" in decoded:
        return False
    return all(segment not in (b"", b".", b"..") for segment in decoded.split(b"/"))
