"""Plans the legs of a request. Pure: reads the request and the pools, and changes neither."""

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

_RARE_FIELDS = frozenset({"prompt_logprobs", "echo", "use_beam_search", "n", "best_of"})
"""Fields that may rule out a hand-off; most requests have none of them."""

_NO_HAND_OFF = {
    "prompt_logprobs": "prompt log-probabilities stay at the prefill server",
    "echo": "the prompt's log-probabilities stay at the prefill server; leave out logprobs",
    "beam_search": "the prefill server keeps one sequence",
    "several_choices": "SGLang's servers meet once for all choices, and would wait without end; send as many requests,"
    " or a list of prompts",
}
"""Reasons in the request itself, so that a retry does not help; and the message if only hand-offs are possible."""

_LIMITS = ("max_tokens", "max_completion_tokens")

_BATCH = re.compile(rb'[ \t\r\n]*\[[ \t\r\n]*["\[]')


def make_plan(path: str, body: RequestBody, pools: Pools) -> Plan:
    """Plan a POST to one of `PROMPT_FIELDS`."""
    if not (prompt := body.raw(PROMPT_FIELDS[path])):
        return Aggregated("malformed")
    has_rare_field = not _RARE_FIELDS.isdisjoint(body.values)
    has_several = path == "/v1/completions" and is_batch(prompt)
    by_rendezvous = (has_rare_field or has_several) and _use_rendezvous(pools)
    reason = _single_instance_reason(body, by_rendezvous=by_rendezvous) if has_rare_field else None
    if reason is None and has_several and not by_rendezvous:
        reason = "prompt_batch"
    if reason is None and not all(map(_is_limit, map(body.values.get, _LIMITS))):
        reason = "malformed"
    if reason is None and has_rare_field:
        reason = _several_choices_reason(body, pools)
    if reason is not None:
        return Aggregated(reason)
    return Disaggregated() if pools.prefill.alive() else Aggregated("no_prefill")


def is_to_be_disaggregated(plan: Plan) -> bool:
    """True if this request must be handed off because no instance does both phases. False if it is malformed: any
    instance returns the error. Raises `InvalidRequest` if it cannot be handed off."""
    reason = plan.reason if isinstance(plan, Aggregated) else None
    if reason in _NO_HAND_OFF:
        label = reason.replace("_", " ")
        raise InvalidRequest(f"{label}: cannot be handed off between SGLang's servers: {_NO_HAND_OFF[reason]}")
    return reason != "malformed"


def _use_rendezvous(pools: Pools) -> bool:
    """True if all decode instances are SGLang's in decode mode. Each prompt of a batch then has a bootstrap room."""
    return not pools.decode.answers_alone


def _single_instance_reason(body: RequestBody, *, by_rendezvous: bool) -> str | None:
    """Reason why these fields rule out a hand-off, or None."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo") and not (by_rendezvous and body.get("logprobs") is None):
        return "echo"
    return "beam_search" if body.get("use_beam_search") else None


def _several_choices_reason(body: RequestBody, pools: Pools) -> str | None:
    """`several_choices` where the engine would fetch the KV once per choice, or None. kvferry's engine fetches it once;
    vLLM's would read P's blocks again after they were freed."""
    counts = [body.get(field) for field in ("n", "best_of")]
    if all(count is None or count == 1 for count in counts):
        return None
    return (
        None
        if all(isinstance(instance.facts, InstanceFacts) for instance in pools.decode.instances)
        else "several_choices"
    )


def is_batch(prompt: bytes) -> bool:
    """True if the JSON text is a list of strings or of lists (a list of numbers is a single prompt). Reads only its
    beginning, since a prompt may be very long."""
    return _BATCH.match(prompt) is not None


def _is_limit(limit: object) -> bool:
    """True if a length limit is null or a positive number. The prefill leg replaces the limit, and so would not report
    an invalid one."""
    return limit is None or (isinstance(limit, int) and limit >= 1)
