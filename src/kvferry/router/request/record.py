"""What is noted about one request: the record of its decision, metrics, spans, what its times teach the estimates, and
what who scales the fleet is told.

Changes nothing of what becomes of the request. Times of the record are wall-clock times, those of legs are on the
router's monotonic clock.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import msgspec

from kvferry.core.messages.timeline import Timeline
from kvferry.core.messages.traffic import RequestObservation
from kvferry.observe.tracing import Attributes, Span
from kvferry.router.choice.decisions import Attempt, PrefillUsage
from kvferry.router.choice.policies.base import PromptTraits
from kvferry.router.client_request import ClientRequest
from kvferry.router.instances.instance import Instance
from kvferry.router.request.leg import Leg
from kvferry.router.request.services import Services

logger = logging.getLogger(__name__)

_EVENT_BYTES = 240
"""About how many bytes a token takes in a stream: decoding is measured by bytes, as answers are not read."""
_TEXT_BYTES = 4.0
"""About how many bytes a token takes in an answer that is sent as a whole."""
_MAX_ATTEMPTS = 64


class RequestRecord:
    """The record of one request: its decision, metrics, spans and what it adds to estimates."""

    def __init__(self, services: Services, request: ClientRequest, asked: PromptTraits) -> None:
        chooser = services.chooser
        self.now, self._metrics, self._estimates = services.clock.wall, services.metrics, chooser.estimates
        self._asked = asked
        self.decision = chooser.record(request.path, asked, request.request_id, request.arrived)
        self._seen = RequestObservation(request.arrived, asked.num_tokens, asked.num_tokens, streams=asked.streams)
        chooser.traffic.note(self._seen)
        self.num_tokens = 0
        """Number of tokens behind the first one, if its instance tells; `Delivery` writes it."""
        self._prefill_ended_at = 0.0
        self._answered: Leg | None = None
        """The decode leg that streams the client's answer with P's KV."""
        self.span: Span | None = None
        """The span of the request, if it is traced."""
        if chooser.tracer is not None:
            about = {"kvferry.request_id": request.request_id.decode(errors="replace")}
            name = f"POST {request.path}"
            self.span = chooser.tracer.request(name, request.headers, request.arrived, about)

    def sent(self, kind: str, instance: Instance) -> int:
        """A leg is sent: `prefill`, `decode` or `continuation`. Returns how many tokens of the prompt the instance
        probably does not have."""
        decision, seen = self.decision, self._seen
        uncached = max(0, self._asked.num_tokens - decision.cached.tokens(instance))
        if kind == "prefill":
            decision.prefill_sent = self.now()
            seen.prefill, seen.uncached = instance.name, uncached
        elif kind == "decode":
            decision.decode_sent = self.now()
            seen.decode = instance.name
            if not seen.prefill:
                seen.uncached = uncached
        return uncached

    def failed(self, leg: Leg, reason: str = "") -> None:
        """Note that a leg is of no use, for this reason or its own."""
        self.failed_instance(leg.instance, reason or leg.failure or "lost")
        if leg.span is not None:
            leg.span.end(self.now(), {}, reason or leg.failure)

    def failed_instance(self, instance: Instance, reason: str) -> None:
        """Note that an instance could not serve it."""
        if len(self.decision.attempts) < _MAX_ATTEMPTS:
            self.decision.attempts.append(Attempt(instance.role, instance.name, reason))
        self._metrics.leg_failed(instance, reason)
        request_id = self.decision.request_id.decode(errors="replace")
        logger.info("request %s: %s failed: %s", request_id, instance, reason)

    def prefilled(self, leg: Leg, usage: PrefillUsage) -> None:
        """P has answered: how long it took, and where its time went."""
        estimates, decision = self._estimates, self.decision
        if usage.timeline is not None and not _can_be(usage.timeline, leg.ended_at - leg.begun_at):
            usage = msgspec.structs.replace(usage, timeline=None)
        decision.prefill_answered, decision.prefill_usage = self.now(), usage
        computed = usage.prompt_tokens - usage.cached_tokens if usage.prompt_tokens else leg.work.uncached
        estimates.prefilled(leg.instance.name, leg.work.ahead + computed, leg.ended_at - leg.begun_at)
        estimates.tokenized(self._asked.num_bytes, usage.prompt_tokens)
        self._see_prefill(leg, usage, computed)
        if self._answered is not None:  # the client had its first token by then
            estimates.hand_off.add(self._answered.work.uncached, 0.0)
        if leg.span is not None:
            told = usage.timeline or Timeline()
            for name, begun, ended in (
                ("queue", told.prefill_queued, told.prefill_started),
                ("prefill", told.prefill_started, told.prefill_done),
            ):
                if begun is not None and ended is not None:
                    leg.span.finished_child(name, begun, ended)
            leg.span.end(decision.prefill_answered, {"kvferry.cached_tokens": usage.cached_tokens})

    def _see_prefill(self, leg: Leg, usage: PrefillUsage, computed: float) -> None:
        seen, told = self._seen, usage.timeline
        self._prefill_ended_at = leg.ended_at
        if usage.prompt_tokens:
            seen.prompt_tokens, seen.uncached = usage.prompt_tokens, int(computed)
        seen.prefill_tokens, seen.prefill_s = leg.work.ahead + computed, leg.ended_at - leg.begun_at
        if told is not None and told.prefill_started is not None and told.prefill_done is not None:
            seen.prefill_tokens, seen.prefill_s = computed, told.prefill_done - told.prefill_started

    def answered(self, leg: Leg, prefill: Leg | None) -> None:
        """An answer for the client has begun; if it streams, with its first token. `prefill`: P's leg, whose KV it
        has."""
        self.decision.first_byte = now = self.now()
        if self._asked.streams and leg.has_served:
            self._seen.first_s = max(0.0, now - self.decision.arrived)  # the clock may have been set back
            if prefill is not None:
                self._seen.hand_off_s = max(0.0, leg.first_byte_at - prefill.ended_at) if prefill.ended_at else 0.0
        if not (self._asked.streams and leg.work.decodes and leg.has_served):
            return
        estimates, work = self._estimates, leg.work
        if prefill is None:
            estimates.prefilled(leg.instance.name, work.ahead + work.uncached, leg.first_byte_at - leg.begun_at)
        elif prefill.ended_at:
            estimates.hand_off.add(work.uncached, max(0.0, leg.first_byte_at - prefill.ended_at))
        else:
            self._answered = leg

    def over(self, legs: list[Leg], num_bytes: int) -> None:
        """The request is over, and so are its legs. `num_bytes` of a whole answer were sent to the client, or 0."""
        decision, last, seen = self.decision, legs[-1] if legs else None, self._seen
        seen.state = "done" if num_bytes else "failed"
        if num_bytes and last is not None and last.work.decodes and last.first_byte_at:
            seconds = last.ended_at - last.first_byte_at
            if self._asked.streams:
                num_tokens = self.num_tokens or max(1.0, num_bytes / _EVENT_BYTES - 1.0)
                self._estimates.decoded(last.work.num_beside, num_tokens, seconds)
                seen.answer_s, seen.output_tokens = seconds, num_tokens
            else:
                seen.output_tokens = min(num_bytes / _TEXT_BYTES, self._asked.max_tokens or 1e9)
                seen.answer_s = last.ended_at - max(last.begun_at, self._prefill_ended_at)
            seen.beside = last.work.num_beside
        decision.done = now = self.now()
        self._metrics.phases(decision.phases())
        if self.span is not None:
            for leg in legs:
                if leg.span is not None:
                    leg.span.end(now, {})
            if decision.first_byte is not None:
                self.span.finished_child("first byte", decision.arrived, decision.first_byte)
            about: Attributes = {"kvferry.decision": decision.reason, "kvferry.prompt_tokens": decision.prompt_tokens}
            self.span.end(now, about, "" if num_bytes else "not delivered")


def _can_be(told: Timeline, seconds: float) -> bool:
    """Whether an instance's stamps of its prefill are in order, and within the `seconds` that its leg took."""
    stamps = [one for one in (told.prefill_queued, told.prefill_started, told.prefill_done) if one is not None]
    return all(one <= later for one, later in pairwise(stamps)) and (not stamps or stamps[-1] - stamps[0] <= seconds)
