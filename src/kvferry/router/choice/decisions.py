"""Routing decisions of the last requests, with reasons and times. Owns a bounded ring of records.

A record is filled while its request is served. It is for operators and contains no address, no prompt and no user name.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import msgspec

from kvferry.core.messages.timeline import Timeline
from kvferry.router.choice.policies.base import Choice
from kvferry.router.choice.prefix_index import NO_MATCH, Match

logger = logging.getLogger(__name__)


class Attempt(msgspec.Struct, frozen=True):
    """A leg that failed."""

    role: str
    instance: str
    reason: str


class PrefillUsage(msgspec.Struct, frozen=True):
    """P's report about its leg: tokens, cached tokens, and its own timestamps; each may be missing."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    timeline: Timeline | None = None


class Decision(msgspec.Struct, kw_only=True):
    """The record of one request, encoded as JSON on demand.

    `cached`: expected cached tokens of the prompt by instance; `choice`: the policy's last choice; `reason`: why the
    request was split, or not. Times are in seconds since 1970; None: the request has not reached this point.
    """

    request_id: bytes
    path: str
    policy: str
    arrived: float
    model: str = ""
    prompt_tokens: int = 0
    has_session: bool = False
    choice: Choice[Any] | None = None
    reason: str = ""
    cached: Match = NO_MATCH
    attempts: list[Attempt] = []
    routed: float | None = None
    prefill_sent: float | None = None
    prefill_answered: float | None = None
    decode_sent: float | None = None
    first_byte: float | None = None
    done: float | None = None
    prefill_usage: PrefillUsage | None = None

    @property
    def prefill_timeline(self) -> Timeline | None:
        """The prefill instance's own timestamps; None if it reports none."""
        return None if self.prefill_usage is None else self.prefill_usage.timeline

    @property
    def prefill(self) -> str | None:
        """The name of the prefill instance; None: the request is not split."""
        return self.choice.prefill.name if self.choice is not None and self.choice.prefill is not None else None

    @property
    def decode(self) -> str | None:
        """The name of the decode instance; None: there was none."""
        return None if self.choice is None else self.choice.decode.name

    def phases(self) -> list[tuple[str, float]]:
        """The duration of each completed phase, in seconds and in order. Phases overlap if both legs are called at the
        same time. A duration is negative if a clock was set back in the phase."""
        sent, answered, first_byte = self.prefill_sent, self.prefill_answered, self.first_byte
        timeline = None if self.prefill_usage is None else self.prefill_usage.timeline
        started, computed = (timeline.prefill_started, timeline.prefill_done) if timeline is not None else (None, None)
        phases: list[tuple[str, float]] = []
        if self.routed is not None:
            phases.append(("router", self.routed - self.arrived))
        if sent is not None:
            if started is not None:
                phases.append(("prefill_queue", started - sent))
            if (ended := computed or answered) is not None:
                phases.append(("prefill", ended - (started or sent)))
        if first_byte is not None:
            if (handed_over := answered or self.decode_sent) is not None:
                phases.append(("transfer_and_decode_queue", first_byte - handed_over))
            phases.append(("first_byte", first_byte - self.arrived))
            if self.done is not None:
                phases.append(("answer", self.done - first_byte))
        return phases

    def server_timing(self) -> bytes:
        """The completed phases, in milliseconds, as a `Server-Timing` header (https://www.w3.org/TR/server-timing/)."""
        return ", ".join(f"{name};dur={1000 * max(0.0, seconds):.1f}" for name, seconds in self.phases()).encode()

    def to_builtins(self) -> dict[str, Any]:
        """The record as operators see it, without addresses."""
        return {
            "request_id": self.request_id.decode(errors="replace"),
            "path": self.path,
            "policy": self.policy,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "has_session": self.has_session,
            "prefill": self.prefill,
            "decode": self.decode,
            "reason": self.reason,
            "scores": self.named_scores(),
            "cached_tokens": self.cached_tokens(),
            "attempts": self.attempts,
            "timings": self._timings(),
            "prefill_usage": self.prefill_usage,
        }

    def named_scores(self) -> dict[str, float]:
        """The policy's scores by leg and by the name of the instance, lower is better."""
        return {
            f"{leg} {target.name}": score
            for leg, targets, values in (self.choice.scores if self.choice is not None else ())
            for target, score in zip(targets, values.tolist(), strict=True)
        }

    def cached_tokens(self) -> dict[str, int]:
        """`cached`, by the name of the instance, without draining instances."""
        return {instance.name: num_tokens for instance, num_tokens in self.cached.items() if not instance.draining}

    def _timings(self) -> dict[str, Any]:
        stamps = {name: getattr(self, name) for name in _STAMPS} | {"prefill": self.prefill_timeline}
        return {name: stamp for name, stamp in stamps.items() if stamp is not None}


_STAMPS = ("arrived", "routed", "prefill_sent", "prefill_answered", "decode_sent", "first_byte", "done")


class Decisions:
    """The records of the last `max_records` requests."""

    def __init__(self, max_records: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=max_records)

    def note(self, decision: Decision) -> None:
        """Add a request that was placed; the rest of its record is filled in later."""
        self._ring.append(decision)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: %s (%s, by %s; prompt of about %d tokens, cached %s; scores %s)",
                decision.request_id.decode(errors="replace"),
                f"{decision.prefill} → {decision.decode}" if decision.prefill else str(decision.decode),
                decision.reason,
                decision.policy,
                decision.prompt_tokens,
                decision.cached_tokens(),
                {name: round(score, 4) for name, score in decision.named_scores().items()},
            )

    def encode(self, max_records: int) -> bytes:
        """The records as JSON, the newest first."""
        newest = [self._ring[-1 - index] for index in range(min(max_records, len(self._ring)))]
        return msgspec.json.encode({"decisions": [decision.to_builtins() for decision in newest]})
