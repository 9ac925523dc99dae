"""Parses the origins of web pages in a setting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from kvferry.core.errors import ConfigError

ANY_ORIGIN = "*"
_NULL = "null"
"""The origin of pages without one, such as files and sandboxed frames."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9.-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")


def read_origins(texts: Iterable[str]) -> frozenset[str]:
    """Parse `--allowed-origins`: each value an origin, or a JSON list of origins as vLLM reads it. Raises
    `ConfigError`."""
    return frozenset(_origin(origin, text) for text in texts for origin in _parse_list(text))


def _parse_list(text: str) -> list[object]:
    if not text.lstrip().startswith("["):
        return [text]
    try:
        origins = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--allowed-origins {text!r} is not a JSON list: {error}") from error
    assert isinstance(origins, list), "it begins with a bracket"
    return origins


def _origin(origin: object, text: str) -> str:
    if isinstance(origin, str) and (origin in (ANY_ORIGIN, _NULL) or _ORIGIN.fullmatch(origin.lower())):
        return origin.lower()
    raise ConfigError(
        f"--allowed-origins {text!r}: {origin!r} is not an origin; write scheme, host and port as browsers send them"
        " (https://example.com, http://localhost:3000), or '*' for all"
    )
