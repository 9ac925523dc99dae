"""A router's record of requests, for the controller that decides on the number of instances."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.core.peer_message import PeerMessage

MAX_OBSERVED = 4096
"""Requests that a router remembers."""

TRAFFIC_PATH = "/kvferry/traffic"
PLAN_PATH = "/kvferry/plan"


class RequestObservation(msgspec.Struct, array_like=True):
    """One request, from its placement on; updated while it is served. Seconds; 0 or None: not known (yet).

    `arrived`: since 1970. `uncached`: tokens of the prompt that were expected to be computed. `prefill_s`: time to
    compute `prefill_tokens` on a prefill instance; if that does not report its own times, its queue is included.
    `first_s`: from arrival to the answer's first byte. `hand_off_s`: from the end of prefill to the first byte.
    `answer_s`: from the first byte to the last, in which `output_tokens` tokens came behind the first one, with
    `beside` answers on the instance. `prefill`, `decode`: names of the instances."""

    arrived: float
    prompt_tokens: int
    uncached: int
    state: Literal["running", "done", "failed"] = "running"
    streams: bool = False
    prefill: str = ""
    decode: str = ""
    prefill_s: float | None = None
    prefill_tokens: float = 0.0
    first_s: float | None = None
    hand_off_s: float | None = None
    answer_s: float | None = None
    output_tokens: float = 0.0
    beside: float = 0.0


class TrafficReport(PeerMessage, frozen=True):
    """The response of GET /kvferry/traffic, from one router. `now`: its clock, seconds since 1970. `num_arrived`:
    requests for a completion since it began, counted on arrival. `num_waiting`: requests that wait for an instance to
    start. `requests`: the last placed requests, oldest first."""

    now: float
    num_arrived: int
    num_waiting: int
    requests: list[RequestObservation]


class ScaleDecision(PeerMessage, frozen=True):
    """One decision about a fleet. `at`: seconds since 1970."""

    at: float
    what: str
    reason: str = msgspec.field(name="why")


class FleetPlan(PeerMessage, frozen=True, omit_defaults=True):
    """The response of GET /kvferry/plan: a fleet's desired state, and why. `desired`: instances by role.
    `disaggregate_from`: uncached tokens from which prompts are computed on prefill instances; None: routers decide.
    `attained`: the share of requests that is expected within the targets. `starts_s`: seconds that an instance takes to
    start; above 0, requests wait for one if there is none. `ttft_s`, `itl_s`: the targets that routers keep to where
    they choose between P and D; 0: there are none. `recommends`: the counts are only recommended, not applied."""

    desired: dict[str, int]
    disaggregate_from: int | None = None
    attained: float | None = None
    goal: float | None = None
    starts_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    recommends: bool = False
    decisions: tuple[ScaleDecision, ...] = ()
