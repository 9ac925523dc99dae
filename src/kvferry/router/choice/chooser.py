"""Collects a request's traits and lets the policy choose its instances.

Owns the state that all requests share: policy, prefix index, pairs of instances, estimates, threshold, decisions,
traffic.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.entropy import RANDOM
from kvferry.core.messages.traffic import MAX_OBSERVED, RequestObservation, TrafficReport
from kvferry.observe.tracing import make_tracer
from kvferry.router.body import RequestBody
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.decisions import Decision, Decisions
from kvferry.router.choice.disaggregation import Threshold
from kvferry.router.choice.pairing import Pairing, able_to_constrain
from kvferry.router.choice.policies.base import Choice, PolicyContext, PromptTraits
from kvferry.router.choice.policies.table import make_policy
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import is_token_ids, read_token_ids, text_prefix
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import Instance
from kvferry.router.instances.pools import Pools
from kvferry.router.paths import PROMPT_FIELDS

logger = logging.getLogger(__name__)

_PREFIX_INDEX_ENTRIES = 400_000
"""Maximum number of prefixes that are remembered for all instances together. Each takes about 150 bytes."""
_CONTEXT_FIELDS = ("cache_salt", "tools", "chat_template", "chat_template_kwargs", "documents", "functions")
"""Fields that determine, with the model, the KV of a prompt's first token."""
_CONTEXT_FIELD_SET = frozenset(_CONTEXT_FIELDS)


_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
"""Fields that name a conversation, the most precise first."""

_CONSTRAINING_FIELDS = frozenset(["response_format", "structured_outputs"])


def _is_constrained(body: RequestBody) -> bool:
    """True if the request asks for structured output, as far as a router reads it."""
    if body.raw("structured_outputs") not in (b"", b"null"):
        return True
    response_format = body.get("response_format")
    return isinstance(response_format, dict) and response_format.get("type") != "text"


def _session_of(body: RequestBody) -> Any:
    """The name of the conversation in a body; None if there is none."""
    return next((value for name in _SESSION_FIELDS if (value := body.values.get(name) and body.get(name))), None)


class Traffic:
    """The number of a router's requests, and the durations of the phases of its last requests, in a bounded ring.
    `num_waiting`: requests that wait for an instance to start."""

    def __init__(self) -> None:
        self._ring: deque[RequestObservation] = deque(maxlen=MAX_OBSERVED)
        self.note: Callable[[RequestObservation], None] = self._ring.append
        """Add a request that was placed; the rest of its observation is filled in later."""
        self._num_arrived = 0
        self.num_waiting = 0

    def arrive(self) -> None:
        """Count a request for a completion, whatever its outcome."""
        self._num_arrived += 1

    def encode(self, now: float, seconds: float, max_requests: int = MAX_OBSERVED) -> bytes:
        """A `TrafficReport` as JSON, with the last `max_requests` requests of those that came in the last `seconds`."""
        newest = islice(reversed(self._ring), max_requests)
        requests = [request for request in newest if request.arrived >= now - seconds][::-1]
        return msgspec.json.encode(TrafficReport(now, self._num_arrived, self.num_waiting, requests))


class Chooser:
    """Chooses instances for all requests of a router."""

    max_session = 256
    log_interval_s = 60.0

    def __init__(self, config: RouterConfig, clock: Clock, pools: Pools) -> None:
        """Raises `ConfigError` if the policy does not exist, or lacks one of the options."""
        self.config, self.clock = config, clock
        self.index, self.estimates = PrefixIndex(_PREFIX_INDEX_ENTRIES), Estimates()
        self.threshold = Threshold(self.estimates, self.index, config.fixed_threshold, pools.fleet_plan)
        context = PolicyContext(clock, Random(RANDOM.getrandbits(64)), self.index, self.estimates, self.threshold)
        self.policy = make_policy(config.policy, context, config.policy_option)
        self._fallback = make_policy("least_loaded", context, ())
        self._log_failure_at = -math.inf
        self.decisions, self.traffic = Decisions(config.max_decisions), Traffic()
        self.pairing = Pairing(config, pools, self.index, self.estimates)
        self.tracer = make_tracer(config.otlp_traces_endpoint, "kvferry-router")
        self._session_header = config.session_header.lower().encode()

    def read(self, path: str, body: RequestBody, headers: Mapping[bytes, bytes]) -> PromptTraits:
        """Return the traits of a POST to one of `PROMPT_FIELDS`."""
        text, model, values = body.raw(PROMPT_FIELDS[path]), body.get("model"), body.values
        num_bytes = len(text)
        num_tokens, token_ids = num_bytes / self.estimates.bytes_per_token, None
        if text[:1] != b'"' and is_token_ids(text):
            num_tokens, num_bytes = text.count(b",") + 1.0, 0
            if self.index.wants_token_ids and not body.raw("cache_salt"):
                token_ids = read_token_ids(text)
        root = f"{path}\0{model}".encode()
        if not _CONTEXT_FIELD_SET.isdisjoint(values):
            root = b"\0".join((root, *map(body.raw, _CONTEXT_FIELDS)))
        limit = values.get("max_completion_tokens") or values.get("max_tokens")
        header = headers.get(self._session_header)
        session_id = header.decode("latin-1") if header else _session_of(body)
        return PromptTraits(
            model=model if isinstance(model, str) else "",
            num_tokens=int(num_tokens),
            num_bytes=num_bytes,
            max_tokens=limit if isinstance(limit, int) else None,
            streams=values.get("stream") is True,
            is_constrained=not _CONSTRAINING_FIELDS.isdisjoint(values) and _is_constrained(body),
            session=session_id[: self.max_session] if isinstance(session_id, str) and session_id else None,
            prefix=text_prefix(text, root, num_tokens / max(1, len(text)), token_ids),
        )

    def record(self, path: str, traits: PromptTraits, request_id: bytes, arrived: float) -> Decision:
        """Begin the record of a request that is about to be placed."""
        self.pairing.refresh()
        return Decision(
            request_id=request_id,
            path=path,
            policy=self.config.policy,
            arrived=arrived,
            model=traits.model[:200],
            prompt_tokens=traits.num_tokens,
            has_session=traits.session is not None,
            cached=self.index.match(traits.prefix),
        )

    def choose(
        self,
        traits: PromptTraits,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        *,
        may_aggregate: bool = True,
    ) -> Choice[Instance]:
        """The policy's choice. The chosen instances are expected to have the prompt's KV cached from now on."""
        if traits.is_constrained:
            prefills, decodes = able_to_constrain(prefills), able_to_constrain(decodes) or decodes
        options = self.pairing.options(traits.model, prefills, decodes, may_aggregate=may_aggregate)
        # Policies may be third-party code: a fault in one must not cost a request its answer.
        try:
            choice = self.policy.choose(traits, options)
        except Exception:  # noqa: BLE001 - logged by `_log_policy_failure`
            self._log_policy_failure()
            choice = self._fallback.choose(traits, options)
        if choice.prefill is not None:
            self.index.record_sent(choice.prefill, traits.prefix)
        self.index.record_sent(choice.decode, traits.prefix)
        try:
            self.policy.on_choice_used(traits, choice)
        except Exception:  # noqa: BLE001 - as above
            self._log_policy_failure()
        return choice

    def _log_policy_failure(self) -> None:
        now = self.clock.monotonic()
        if now >= self._log_failure_at:
            self._log_failure_at = now + self.log_interval_s
            logger.exception("the policy %s failed; the least loaded instances are chosen", self.config.policy)
