"""Field names of requests: known, other servers' (`other_fields`), and misspelled names.

An unknown name is ignored and reported in a response header, since clients send many harmless ones. A name that is
nearly a known one is refused, since the client would not get the requested effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import cache

import msgspec

from kvferry.api.other_fields import REFUSED, WITHOUT_EFFECT
from kvferry.api.requests import GenerationRequest
from kvferry.core.errors import InvalidRequest

WARNING_HEADER = "X-Kvferry-Warning"
"""Sent with the answer to a request of which fields were ignored."""

_SYNONYMS = {
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
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


def ignored_fields(
    names: Iterable[str], body_type: type[msgspec.Struct], others: Collection[str] = ()
) -> tuple[str, ...]:
    """The `names` that are not fields of `body_type`. Raises `InvalidRequest` for a name that is nearly a field, and is
    none of `others`, which the API has too."""
    known_names = _field_names(body_type)
    unknown = tuple(name for name in names if name not in known_names)
    for name in unknown:
        if (
            name not in others
            and name not in WITHOUT_EFFECT
            and name not in REFUSED
            and (suggestion := _suggest(name, _suggestions(body_type))) is not None
        ):
            shown = printable(name)
            raise InvalidRequest(f"unknown field {shown!r}; did you mean {suggestion!r}?", param=shown)
    return unknown


def warning_of(ignored: Sequence[str]) -> str | None:
    """The value of `WARNING_HEADER`, in ASCII and of bounded length; None without ignored fields."""
    if not ignored:
        return None
    names = ", ".join(printable(name) for name in ignored[:_MAX_NAMES])
    more = f" and {len(ignored) - _MAX_NAMES} more" if len(ignored) > _MAX_NAMES else ""
    return f"fields without effect: {names}{more}"


@cache
def _field_names(body_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(body_type.__struct_encode_fields__)


@cache
def _suggestions(body_type: type[msgspec.Struct]) -> frozenset[str]:
    """Names that a misspelled one may mean."""
    known_names = _field_names(body_type)
    return known_names | REFUSED.keys() if issubclass(body_type, GenerationRequest) else known_names


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


def printable(name: str) -> str:
    shown = name.encode("ascii", "backslashreplace").decode()
    shown = "".join(character if character.isprintable() and character != "," else "?" for character in shown)
    return shown if len(shown) <= _MAX_CHARACTERS else shown[: _MAX_CHARACTERS - 3] + "..."
