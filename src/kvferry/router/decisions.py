"""Why each of the last requests went where it went, and when. Owns a ring of records; bounded.

A record is filled while its request is served. It has no address, no prompt and no name of a user: it is for operators,
and still says as little about clients as it can.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.timeline import Timeline
from kvferry.router.legs import PrefillUsage
from kvferry.router.policies.base import Scores

logger = logging.getLogger(__name__)


class Attempt(msgspec.Struct, frozen=True):
    """A leg that came to nothing."""

    role: str
    instance: str
    reason: str


class Timings(msgspec.Struct, omit_defaults=True):
    """A request at the router, in seconds since the epoch; None: it did not come to that. `prefill`: what the prefill
    instance says of its own part, if it does."""

    arrived: float | None = None
    routed: float | None = None
    prefill_sent: float | None = None
    prefill_answered: float | None = None
    decode_sent: float | None = None
    first_byte: float | None = None
    done: float | None = None
    prefill: Timeline | None = None

    def phases(self) -> list[tuple[str, float]]:
        """How long each phase took, in seconds, in order, as far as they are over. They overlap where both legs are
        called at once."""
        ours, theirs = self, self.prefill or Timeline()
        prefill_from = theirs.prefill_started or self.prefill_sent
        spans = [
            ("router", ours.arrived, ours.routed),
            ("prefill_queue", ours.prefill_sent, theirs.prefill_started),
            ("prefill", prefill_from, theirs.prefill_done or ours.prefill_answered),
            ("transfer_and_decode_queue", ours.prefill_answered or ours.decode_sent, ours.first_byte),
            ("first_byte", ours.arrived, ours.first_byte),
            ("answer", ours.first_byte, ours.done),
        ]
        return [(name, max(0.0, end - begin)) for name, begin, end in spans if begin is not None and end is not None]

    def server_timing(self) -> bytes:
        """The phases that are over, in milliseconds, as a header (https://www.w3.org/TR/server-timing/)."""
        return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in self.phases()).encode()


class Decision(msgspec.Struct, kw_only=True):
    """Of one request. `scores`: the policy's, by leg and instance, lower is better; `cached_tokens`: how many of the
    prompt each instance seemed to have; `reason`: why it was split, or not."""

    request_id: str
    path: str
    policy: str
    model: str = ""
    prompt_tokens: int = 0
    has_session: bool = False
    prefill: str | None = None
    decode: str | None = None
    reason: str = ""
    scores: Sequence[Scores] = ()
    cached_tokens: Mapping[str, int] = {}
    attempts: list[Attempt] = []
    timings: Timings = msgspec.field(default_factory=Timings)
    prefill_usage: PrefillUsage | None = None

    def named_scores(self) -> dict[str, float]:
        """By leg and instance."""
        return {
            f"{leg} {one.name}": score
            for leg, targets, found in self.scores
            for one, score in zip(targets, found, strict=True)
        }


class Decisions:
    """The last `most` of them."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._ring: deque[Decision] = deque(maxlen=most)
        self._clock = clock

    def note(self, decision: Decision) -> None:
        """A request was given its place; what comes of it is filled in later."""
        self._ring.append(decision)
        if logger.isEnabledFor(logging.DEBUG):
            where = f"{decision.prefill} → {decision.decode}" if decision.prefill else str(decision.decode)
            logger.debug(
                "request %s: %s (%s, by %s; prompt of about %d tokens, cached %s; scores %s)",
                decision.request_id,
                where,
                decision.reason,
                decision.policy,
                decision.prompt_tokens,
                dict(decision.cached_tokens),
                {name: round(score, 4) for name, score in decision.named_scores().items()},
            )

    def now(self) -> float:
        """For stamps."""
        return self._clock.wall()

    def encode(self, most: int) -> bytes:
        """As JSON, the newest first."""
        newest = [self._ring[-1 - place] for place in range(min(most, len(self._ring)))]
        return msgspec.json.encode(
            {"decisions": [{**msgspec.structs.asdict(one), "scores": one.named_scores()} for one in newest]}
        )
