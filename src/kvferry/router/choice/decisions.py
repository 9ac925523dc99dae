"""Why each of the last requests went to its instances, and when. Owns a bounded ring of records.

A record is filled while its request is served. It contains no address, no prompt and no user name; it is for operators,
and still says as little about clients as possible.
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
    """What P reports about its leg: tokens, cached tokens, and its own timestamps; each may be missing."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    timeline: Timeline | None = None


class Decision(msgspec.Struct, kw_only=True):
    """The record of one request, made into JSON only when somebody asks for it.

    `cached`: how many tokens of the prompt each instance was expected to have cached; `choice`: the policy's last;
    `reason`: why the request was split, or not. Times are in seconds since the epoch; None: it did not get that far.
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
    def told(self) -> Timeline | None:
        """What the prefill instance reports about its own part, if it does."""
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
        """The duration of each phase that is over, in seconds and in order. They overlap if both legs are called at the
        same time, and are negative where a clock was set back meanwhile."""
        sent, answered, first_byte = self.prefill_sent, self.prefill_answered, self.first_byte
        told = None if self.prefill_usage is None else self.prefill_usage.timeline
        started, computed = (told.prefill_started, told.prefill_done) if told is not None else (None, None)
        found: list[tuple[str, float]] = []
        if self.routed is not None:
            found.append(("router", self.routed - self.arrived))
        if sent is not None:
            if started is not None:
                found.append(("prefill_queue", started - sent))
            if (ended := computed or answered) is not None:
                found.append(("prefill", ended - (started or sent)))
        if first_byte is not None:
            if (handed_over := answered or self.decode_sent) is not None:
                found.append(("transfer_and_decode_queue", first_byte - handed_over))
            found.append(("first_byte", first_byte - self.arrived))
            if self.done is not None:
                found.append(("answer", self.done - first_byte))
        return found

    def server_timing(self) -> bytes:
        """The phases that are over, in milliseconds, as a `Server-Timing` header
        (https://www.w3.org/TR/server-timing/)."""
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
            f"{leg} {one.name}": score
            for leg, targets, found in (self.choice.scores if self.choice is not None else ())
            for one, score in zip(targets, found.tolist(), strict=True)
        }

    def cached_tokens(self) -> dict[str, int]:
        """`cached`, by the name of the instance. Those that leave or have left are not named."""
        return {one.name: num_tokens for one, num_tokens in self.cached.items() if not one.draining}

    def _timings(self) -> dict[str, Any]:
        stamps = {name: getattr(self, name) for name in _STAMPS} | {"prefill": self.told}
        return {name: stamp for name, stamp in stamps.items() if stamp is not None}


_STAMPS = ("arrived", "routed", "prefill_sent", "prefill_answered", "decode_sent", "first_byte", "done")


class Decisions:
    """The records of the last `most` requests."""

    def __init__(self, most: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=most)

    def note(self, decision: Decision) -> None:
        """A request was placed; the rest of its record is filled in later."""
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

    def encode(self, most: int) -> bytes:
        """The records as JSON, the newest first."""
        newest = [self._ring[-1 - place] for place in range(min(most, len(self._ring)))]
        return msgspec.json.encode({"decisions": [one.to_builtins() for one in newest]})
