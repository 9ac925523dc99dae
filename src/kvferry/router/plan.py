"""Which legs a request gets. Pure: looks at the request and at the pools, and changes neither."""

from __future__ import annotations

import re

import msgspec

from kvferry.router.body import RequestBody
from kvferry.router.instance import InstanceFacts
from kvferry.router.paths import PROMPT_FIELDS
from kvferry.router.pools import Pools


class Split(msgspec.Struct, frozen=True):
    """A prefill leg and a decode leg."""


class Whole(msgspec.Struct, frozen=True):
    """Both phases on one decode instance. `reason` is a short label for metrics."""

    reason: str


Plan = Split | Whole

_BATCH = re.compile(rb'[ \t\r\n]*\[[ \t\r\n]*["\[]')


def make_plan(path: str, body: RequestBody, pools: Pools) -> Plan:
    """How to serve a POST to one of `PROMPT_FIELDS`."""
    if not body.raw(PROMPT_FIELDS[path]):
        return Whole("malformed")
    reason = _needs_one_instance(path, body) or _cannot_be_shared(body, pools)
    if reason:
        return Whole(reason)
    return Split() if pools.prefill.num_alive else Whole("no_prefill")


def _needs_one_instance(path: str, body: RequestBody) -> str | None:
    """Why a hand-off cannot answer this request, or None."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo"):
        return "echo"
    if body.get("use_beam_search"):
        return "beam_search"
    if path == "/v1/completions" and is_batch(body.raw("prompt")):
        return "prompt_batch"
    return "malformed" if _asks_for_no_token(body) else None


def _cannot_be_shared(body: RequestBody, pools: Pools) -> str | None:
    """Several choices take a ticket several times, which only kvferry's own engine knows to do once.

    vLLM's would read P's blocks again after they were given up.
    """
    counts = [body.get(field) for field in ("n", "best_of")]
    if all(count is None or count == 1 for count in counts):
        return None
    return None if all(isinstance(one.facts, InstanceFacts) for one in pools.decode.instances) else "several_choices"


def is_batch(prompt: bytes) -> bool:
    """Whether the JSON text is a list of strings or of lists (a list of numbers is one prompt). A prompt may be very
    long, so only its beginning is looked at."""
    return _BATCH.match(prompt) is not None


def _asks_for_no_token(body: RequestBody) -> bool:
    """Whether a length limit is not a positive number: the prefill leg would hide that, as it has its own."""
    limits = [body.get(field) for field in ("max_tokens", "max_completion_tokens")]
    return any(limit is not None and not (isinstance(limit, int) and limit >= 1) for limit in limits)
