"""Which legs a request gets. Pure: looks at the request and at the pools, and changes neither."""

from __future__ import annotations

import re

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.body import RequestBody
from kvferry.router.instances.pools import Pools
from kvferry.router.paths import PROMPT_FIELDS


class Disaggregated(msgspec.Struct, frozen=True):
    """A prefill leg and a decode leg."""


class Aggregated(msgspec.Struct, frozen=True):
    """Both phases on one decode instance. `reason` is a short label for metrics."""

    reason: str


Plan = Disaggregated | Aggregated

_UNUSUAL = frozenset({"prompt_logprobs", "echo", "use_beam_search", "n", "best_of"})
"""Fields that may stand against a hand-off; most requests have none of them."""

_NEED_ONE = {
    "prompt_logprobs": "prompt log-probabilities stay at the prefill server",
    "echo": "the prompt's log-probabilities stay at the prefill server; leave out logprobs",
    "beam_search": "the prefill server keeps one sequence",
    "several_choices": "SGLang's servers meet once for all choices, and would wait without end; send as many requests,"
    " or a list of prompts",
}
"""Reasons that lie in the request, and stay if it is sent again; and why SGLang's servers cannot hand it off."""

_LIMITS = ("max_tokens", "max_completion_tokens")

_BATCH = re.compile(rb'[ \t\r\n]*\[[ \t\r\n]*["\[]')


def make_plan(path: str, body: RequestBody, pools: Pools) -> Plan:
    """How to serve a POST to one of `PROMPT_FIELDS`."""
    if not (prompt := body.raw(PROMPT_FIELDS[path])):
        return Aggregated("malformed")
    is_unusual = not _UNUSUAL.isdisjoint(body.values)
    has_several = path == "/v1/completions" and is_batch(prompt)
    meet_in_rooms = (is_unusual or has_several) and _meet_in_rooms(pools)
    reason = _needs_one_instance(body, meet_in_rooms=meet_in_rooms) if is_unusual else None
    if reason is None and has_several and not meet_in_rooms:
        reason = "prompt_batch"
    if reason is None and not all(map(_is_limit, map(body.values.get, _LIMITS))):
        reason = "malformed"
    if reason is None and is_unusual:
        reason = _cannot_be_shared(body, pools)
    if reason is not None:
        return Aggregated(reason)
    return Disaggregated() if pools.prefill.alive() else Aggregated("no_prefill")


def is_to_be_disaggregated(plan: Plan) -> bool:
    """Whether this request is to be handed off where no instance does both phases; what is malformed gets the error of
    any. Raises `InvalidRequest` if it cannot be."""
    reason = plan.reason if isinstance(plan, Aggregated) else None
    if reason in _NEED_ONE:
        what = reason.replace("_", " ")
        raise InvalidRequest(f"{what}: cannot be handed off between SGLang's servers: {_NEED_ONE[reason]}")
    return reason != "malformed"


def _meet_in_rooms(pools: Pools) -> bool:
    """Are all decode instances SGLang's of that one phase? Each prompt of a batch then has a room of its own."""
    decodes = pools.decode.instances
    return bool(decodes) and not any(instance.answers_alone for instance in decodes)


def _needs_one_instance(body: RequestBody, *, meet_in_rooms: bool) -> str | None:
    """Why this request cannot be handed off because of what it asks for, or None."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo") and not (meet_in_rooms and body.get("logprobs") is None):
        return "echo"
    return "beam_search" if body.get("use_beam_search") else None


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


def _is_limit(limit: object) -> bool:
    """Whether a length limit is null or a positive number: the prefill leg, which has a limit of its own, would not
    report another one."""
    return limit is None or (isinstance(limit, int) and limit >= 1)
