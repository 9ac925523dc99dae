"""Field names of requests: known ones, those of other servers, and misspelled ones.

An unknown name is ignored and reported in a response header, since clients send many that do no harm. A name that is
nearly a known one is refused, since the client would not get what it asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache

import msgspec

from kvferry.core.errors import InvalidRequest

WARNING_HEADER = "X-Kvferry-Warning"
"""Sent with an answer that left some of the request aside."""

WITHOUT_EFFECT = frozenset(
    [
        *("early_stopping", "include_reasoning", "length_penalty", "metadata", "mm_processor_kwargs"),
        *("moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "verbosity", "vllm_xargs"),
    ]
)
"""Fields of the OpenAI API and of vLLM that this server knows and that change nothing here."""

_OTHER_NAMES = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_completion_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "temp": "temperature",
}
"""What other APIs call the same."""

_NEAR = 0.85
_MAX_NAMED = 8
_MAX_CHARACTERS = 40


def ignored_fields(names: Iterable[str], body_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """The `names` that are not fields of `body_type`. Raises `InvalidRequest` for one that is almost a field of it."""
    known = _known(body_type)
    unknown = tuple(name for name in names if name not in known)
    for name in unknown:
        if name not in WITHOUT_EFFECT and (meant := _meant(name, known)) is not None:
            shown = _shown(name)
            raise InvalidRequest(f"unknown field {shown!r}; did you mean {meant!r}?", param=shown)
    return unknown


def warning_of(ignored: Sequence[str]) -> str | None:
    """The value of `WARNING_HEADER`, in ASCII and of bounded length; None where there is nothing to warn of."""
    if not ignored:
        return None
    names = ", ".join(_shown(name) for name in ignored[:_MAX_NAMED])
    more = f" and {len(ignored) - _MAX_NAMED} more" if len(ignored) > _MAX_NAMED else ""
    return f"fields without effect: {names}{more}"


@cache
def _known(body_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(body_type.__struct_encode_fields__)


def _meant(name: str, known: frozenset[str]) -> str | None:
    if len(name) > _MAX_CHARACTERS:
        return None
    if (other := _OTHER_NAMES.get(name)) in known:
        return other
    plain = {_plain(one): one for one in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=_NEAR)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    """`maxTokens`, `max-tokens` and `max_tokens` are written alike."""
    return name.lower().replace("_", "").replace("-", "")


def _shown(name: str) -> str:
    shown = name.encode("ascii", "backslashreplace").decode()
    shown = "".join(one if one.isprintable() and one != "," else "?" for one in shown)
    return shown if len(shown) <= _MAX_CHARACTERS else shown[: _MAX_CHARACTERS - 3] + "..."
