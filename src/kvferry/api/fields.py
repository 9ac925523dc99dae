"""Field names of requests: known, other servers', and misspelled names.

An unknown name is ignored and reported in a response header, since clients send many harmless ones. A name that is
nearly a known one is refused, since the client would not get the requested effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache

import msgspec

from kvferry.core.errors import InvalidRequest

WARNING_HEADER = "X-Kvferry-Warning"
"""Sent with the answer to a request of which fields were ignored."""

WITHOUT_EFFECT = frozenset(
    [
        *("early_stopping", "include_reasoning", "length_penalty", "metadata", "mm_processor_kwargs"),
        *("moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "verbosity", "vllm_xargs"),
    ]
)
"""Fields of the OpenAI API and of vLLM that this server knows and that have no effect."""

_SYNONYMS = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_completion_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "temp": "temperature",
}
"""Names of the same fields in other APIs."""

_MIN_SIMILARITY = 0.85
_MAX_NAMES = 8
_MAX_CHARACTERS = 40


def ignored_fields(names: Iterable[str], body_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """The `names` that are not fields of `body_type`. Raises `InvalidRequest` for a name that is nearly a field."""
    known_names = _field_names(body_type)
    unknown = tuple(name for name in names if name not in known_names)
    for name in unknown:
        if name not in WITHOUT_EFFECT and (suggestion := _suggest(name, known_names)) is not None:
            shown = _printable(name)
            raise InvalidRequest(f"unknown field {shown!r}; did you mean {suggestion!r}?", param=shown)
    return unknown


def warning_of(ignored: Sequence[str]) -> str | None:
    """The value of `WARNING_HEADER`, in ASCII and of bounded length; None without ignored fields."""
    if not ignored:
        return None
    names = ", ".join(_printable(name) for name in ignored[:_MAX_NAMES])
    more = f" and {len(ignored) - _MAX_NAMES} more" if len(ignored) > _MAX_NAMES else ""
    return f"fields without effect: {names}{more}"


@cache
def _field_names(body_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(body_type.__struct_encode_fields__)


def _suggest(name: str, known_names: frozenset[str]) -> str | None:
    if len(name) > _MAX_CHARACTERS:
        return None
    if (other := _SYNONYMS.get(name)) in known_names:
        return other
    known_by_plain = {_plain(known_name): known_name for known_name in known_names}
    matches = get_close_matches(_plain(name), known_by_plain, n=1, cutoff=_MIN_SIMILARITY)
    return known_by_plain[matches[0]] if matches else None


def _plain(name: str) -> str:
    """Normalise a name: `maxTokens`, `max-tokens` and `max_tokens` become equal."""
    return name.lower().replace("_", "").replace("-", "")


def _printable(name: str) -> str:
    shown = name.encode("ascii", "backslashreplace").decode()
    shown = "".join(character if character.isprintable() and character != "," else "?" for character in shown)
    return shown if len(shown) <= _MAX_CHARACTERS else shown[: _MAX_CHARACTERS - 3] + "..."
