"""Origins of web pages, as a setting names them."""

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
    """The origins that `--allowed-origins` names, each as itself or in a JSON list as vLLM reads it. Raises
    `ConfigError`."""
    return frozenset(_origin(origin, text) for text in texts for origin in _listed(text))


def _listed(text: str) -> list[object]:
    if not text.lstrip().startswith("["):
        return [text]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--allowed-origins {text!r} is not a JSON list: {error}") from error
    assert isinstance(found, list), "it begins with a bracket"
    return found


def _origin(origin: object, text: str) -> str:
    if isinstance(origin, str) and (origin in (ANY_ORIGIN, _NULL) or _ORIGIN.fullmatch(origin.lower())):
        return origin.lower()
    raise ConfigError(
        f"--allowed-origins {text!r}: {origin!r} is not an origin; write scheme, host and port as browsers send them"
        " (https://example.com, http://localhost:3000), or '*' for all"
    )
