"""The record of one request: its decision, metrics, spans, measurements for the estimates and for the autoscaler.

Does not influence the request. Times of the record are wall-clock times; times of legs are on the router's monotonic
clock.
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
"""Approximate bytes of a token in a stream: decoding is measured by bytes, because answers are not parsed."""
_TEXT_BYTES = 4.0
"""Approximate bytes of a token in an unstreamed answer."""


class RequestRecord:
    """Records the decision, metrics, spans and measurements of one request."""

    max_attempts = 64

    def __init__(self, services: Services, request: ClientRequest, traits: PromptTraits) -> None:
        chooser = services.chooser
        self.now, self._metrics, self._estimates = services.clock.wall, services.metrics, chooser.estimates
        self._traits = traits
        self.decision = chooser.record(request.path, traits, request.request_id, request.arrived)
        self._observation = RequestObservation(
            request.arrived, traits.num_tokens, traits.num_tokens, streams=traits.streams
        )
        chooser.traffic.note(self._observation)
        self.num_tokens = 0
        """Number of tokens after the first one, if the instance reports it; `Delivery` sets it."""
        self._prefill_ended_at = 0.0
        self._answered: Leg | None = None
        """The decode leg that streams the client's answer with P's KV."""
        self.span: Span | None = None
        """The span of the request, if it is traced."""
        if chooser.tracer is not None:
            attributes = {"kvferry.request_id": request.request_id.decode(errors="replace")}
            name = f"POST {request.path}"
            self.span = chooser.tracer.request(name, request.headers, request.arrived, attributes)

    def sent(self, kind: str, instance: Instance) -> int:
        """Record that a leg is sent: `prefill`, `decode` or `continuation`. Return the number of tokens of the prompt
        that the instance probably has not cached."""
        decision, observation = self.decision, self._observation
        uncached = max(0, self._traits.num_tokens - decision.cached.tokens(instance))
        if kind == "prefill":
            decision.prefill_sent = self.now()
            observation.prefill, observation.uncached = instance.name, uncached
        elif kind == "decode":
            decision.decode_sent = self.now()
            observation.decode = instance.name
            if not observation.prefill:
                observation.uncached = uncached
        return uncached

    def failed(self, leg: Leg, reason: str = "") -> None:
        """Record that a leg failed, for this reason or its own."""
        self.failed_instance(leg.instance, reason or leg.failure or "lost")
        if leg.span is not None:
            leg.span.end(self.now(), {}, reason or leg.failure)

    def failed_instance(self, instance: Instance, reason: str) -> None:
        """Record that an instance could not serve the request."""
        if len(self.decision.attempts) < self.max_attempts:
            self.decision.attempts.append(Attempt(instance.role, instance.name, reason))
        self._metrics.leg_failed(instance, reason)
        request_id = self.decision.request_id.decode(errors="replace")
        logger.info("request %s: %s failed: %s", request_id, instance, reason)

    def prefilled(self, leg: Leg, usage: PrefillUsage) -> None:
        """Record P's answer, its duration and its phases."""
        estimates, decision = self._estimates, self.decision
        if usage.timeline is not None and not _is_plausible(usage.timeline, leg.ended_at - leg.begun_at):
            usage = msgspec.structs.replace(usage, timeline=None)
        decision.prefill_answered, decision.prefill_usage = self.now(), usage
        computed = usage.prompt_tokens - usage.cached_tokens if usage.prompt_tokens else leg.work.uncached
        estimates.prefilled(leg.instance.name, leg.work.ahead + computed, leg.ended_at - leg.begun_at)
        estimates.tokenized(self._traits.num_bytes, usage.prompt_tokens)
        self._observe_prefill(leg, usage, computed)
        if self._answered is not None:  # the client had its first token at this time
            estimates.hand_off.add(self._answered.work.uncached, 0.0)
        if leg.span is not None:
            timeline = usage.timeline or Timeline()
            for name, begun, ended in (
                ("queue", timeline.prefill_queued, timeline.prefill_started),
                ("prefill", timeline.prefill_started, timeline.prefill_done),
            ):
                if begun is not None and ended is not None:
                    leg.span.finished_child(name, begun, ended)
            leg.span.end(decision.prefill_answered, {"kvferry.cached_tokens": usage.cached_tokens})

    def _observe_prefill(self, leg: Leg, usage: PrefillUsage, computed: float) -> None:
        observation, timeline = self._observation, usage.timeline
        self._prefill_ended_at = leg.ended_at
        if usage.prompt_tokens:
            observation.prompt_tokens, observation.uncached = usage.prompt_tokens, int(computed)
        observation.prefill_tokens, observation.prefill_s = leg.work.ahead + computed, leg.ended_at - leg.begun_at
        if timeline is not None and timeline.prefill_started is not None and timeline.prefill_done is not None:
            observation.prefill_tokens, observation.prefill_s = (
                computed,
                timeline.prefill_done - timeline.prefill_started,
            )

    def on_answered(self, leg: Leg, prefill: Leg | None) -> None:
        """Record that an answer for the client has begun; if it streams, with its first token. `prefill`: P's leg,
        whose KV it uses."""
        self.decision.first_byte = now = self.now()
        if self._traits.streams and leg.has_served:
            self._observation.first_s = max(0.0, now - self.decision.arrived)  # the clock may have been set back
            if prefill is not None:
                self._observation.hand_off_s = (
                    max(0.0, leg.first_byte_at - prefill.ended_at) if prefill.ended_at else 0.0
                )
        if not (self._traits.streams and leg.work.decodes and leg.has_served):
            return
        estimates, work = self._estimates, leg.work
        if prefill is None:
            estimates.prefilled(leg.instance.name, work.ahead + work.uncached, leg.first_byte_at - leg.begun_at)
        elif prefill.ended_at:
            estimates.hand_off.add(work.uncached, max(0.0, leg.first_byte_at - prefill.ended_at))
        else:
            self._answered = leg

    def on_ended(self, legs: list[Leg], num_bytes: int) -> None:
        """Record the end of the request and its legs. `num_bytes`: bytes of a complete answer sent to the client, else
        0."""
        decision, last, observation = self.decision, legs[-1] if legs else None, self._observation
        observation.state = "done" if num_bytes else "failed"
        if num_bytes and last is not None and last.work.decodes and last.first_byte_at:
            seconds = last.ended_at - last.first_byte_at
            if self._traits.streams:
                num_tokens = self.num_tokens or max(1.0, num_bytes / _EVENT_BYTES - 1.0)
                self._estimates.decoded(last.work.num_concurrent, num_tokens, seconds)
                observation.answer_s, observation.output_tokens = seconds, num_tokens
            else:
                observation.output_tokens = min(num_bytes / _TEXT_BYTES, self._traits.max_tokens or 1e9)
                observation.answer_s = last.ended_at - max(last.begun_at, self._prefill_ended_at)
            observation.beside = last.work.num_concurrent
        decision.done = now = self.now()
        self._metrics.phases(decision.phases())
        if self.span is not None:
            for leg in legs:
                if leg.span is not None:
                    leg.span.end(now, {})
            if decision.first_byte is not None:
                self.span.finished_child("first byte", decision.arrived, decision.first_byte)
            attributes: Attributes = {
                "kvferry.decision": decision.reason,
                "kvferry.prompt_tokens": decision.prompt_tokens,
            }
            self.span.end(now, attributes, "" if num_bytes else "not delivered")


def _is_plausible(timeline: Timeline, seconds: float) -> bool:
    """True if an instance's timestamps of its prefill are in order, and within the `seconds` that its leg took."""
    stages = (timeline.prefill_queued, timeline.prefill_started, timeline.prefill_done)
    stamps = [stamp for stamp in stages if stamp is not None]
    return all(earlier <= later for earlier, later in pairwise(stamps)) and (
        not stamps or stamps[-1] - stamps[0] <= seconds
    )
