"""Collects what a policy needs to know about a request, and asks the policy.

Owns what all requests share: the policy, the prefix index, the pairs of instances, the estimates, the threshold, the
decisions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from random import Random

from kvferry.core.clock import Clock
from kvferry.core.entropy import RANDOM
from kvferry.observe.tracing import make_tracer
from kvferry.router.body import RequestBody
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.decisions import Decision, Decisions
from kvferry.router.choice.disaggregation import Threshold
from kvferry.router.choice.pairing import Pairing
from kvferry.router.choice.policies.base import Choice, PolicyContext, PromptTraits
from kvferry.router.choice.policies.table import make_policy
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import is_token_ids, read_token_ids, text_prefix
from kvferry.router.choice.traffic import Traffic
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import Instance
from kvferry.router.instances.pools import Pools
from kvferry.router.paths import PROMPT_FIELDS

logger = logging.getLogger(__name__)

_TELL_AGAIN_S = 60.0
_MAX_SESSION = 256
_PREFIX_INDEX_ENTRIES = 400_000
"""Prefixes that are remembered for all instances together, about 150 bytes each."""
_BEFORE_THE_PROMPT = ("cache_salt", "tools", "chat_template", "chat_template_kwargs", "documents", "functions")
"""Fields that decide, beside the model, about the KV of a prompt's first token."""
_ANY_BEFORE_THE_PROMPT = frozenset(_BEFORE_THE_PROMPT)


class Chooser:
    """Chooses instances for all requests of a router."""

    def __init__(self, config: RouterConfig, clock: Clock, pools: Pools) -> None:
        """Raises `ConfigError` if the policy does not exist or does not have one of the options."""
        self.config, self.clock = config, clock
        self.index, self.estimates = PrefixIndex(_PREFIX_INDEX_ENTRIES), Estimates()
        self.threshold = Threshold(self.estimates, self.index, config.fixed_threshold, pools.directions)
        context = PolicyContext(clock, Random(RANDOM.getrandbits(64)), self.index, self.estimates, self.threshold)
        self.policy = make_policy(config.policy, context, config.policy_option)
        self._fallback = make_policy("least_loaded", context, ())
        self._tell_of_policy_at = -math.inf
        self.decisions, self.traffic = Decisions(config.max_decisions), Traffic()
        self.pairing = Pairing(config, pools, self.index, self.estimates)
        self.tracer = make_tracer(config.otlp_traces_endpoint, "kvferry-router")
        self._session_header = config.session_header.lower().encode()

    def read(self, path: str, body: RequestBody, headers: Mapping[bytes, bytes]) -> PromptTraits:
        """What a policy sees of a POST to one of `PROMPT_FIELDS`."""
        text, model, values = body.raw(PROMPT_FIELDS[path]), body.get("model"), body.values
        num_bytes = len(text)
        num_tokens, token_ids = num_bytes / self.estimates.bytes_per_token, None
        if text[:1] != b'"' and is_token_ids(text):
            num_tokens, num_bytes = text.count(b",") + 1.0, 0
            if self.index.wants_token_ids and not body.raw("cache_salt"):
                token_ids = read_token_ids(text)
        root = f"{path}\0{model}".encode()
        if not _ANY_BEFORE_THE_PROMPT.isdisjoint(values):
            root = b"\0".join((root, *map(body.raw, _BEFORE_THE_PROMPT)))
        limit = values.get("max_completion_tokens") or values.get("max_tokens")
        session = headers.get(self._session_header)
        named = session.decode("latin-1") if session else values.get("user") and body.get("user")
        return PromptTraits(
            model=model if isinstance(model, str) else "",
            num_tokens=int(num_tokens),
            num_bytes=num_bytes,
            max_tokens=limit if isinstance(limit, int) else None,
            streams=values.get("stream") is True,
            session=named[:_MAX_SESSION] if isinstance(named, str) and named else None,
            prefix=text_prefix(text, root, num_tokens / max(1, len(text)), token_ids),
        )

    def record(self, path: str, asked: PromptTraits, request_id: bytes, arrived: float) -> Decision:
        """Begin the record of a request that is about to be placed."""
        self.pairing.catch_up()
        return Decision(
            request_id=request_id,
            path=path,
            policy=self.config.policy,
            arrived=arrived,
            model=asked.model[:200],
            prompt_tokens=asked.num_tokens,
            has_session=asked.session is not None,
            cached=self.index.match(asked.prefix),
        )

    def choose(
        self,
        asked: PromptTraits,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        *,
        may_stay_whole: bool = True,
    ) -> Choice[Instance]:
        """The policy's choice. The chosen instances are expected to have the prompt's KV cached from now on."""
        options = self.pairing.options(asked.model, prefills, decodes, may_stay_whole=may_stay_whole)
        # The edge to other people's code: a fault in it must not cost a request its answer.
        try:
            choice = self.policy.choose(asked, options)
        except Exception:  # noqa: BLE001 - it is logged there
            self._policy_failed()
            choice = self._fallback.choose(asked, options)
        if choice.prefill is not None:
            self.index.served(choice.prefill, asked.prefix)
        self.index.served(choice.decode, asked.prefix)
        try:
            self.policy.placed(asked, choice)
        except Exception:  # noqa: BLE001 - likewise
            self._policy_failed()
        return choice

    def _policy_failed(self) -> None:
        now = self.clock.monotonic()
        if now >= self._tell_of_policy_at:
            self._tell_of_policy_at = now + _TELL_AGAIN_S
            logger.exception("the policy %s failed; the least loaded instances are chosen", self.config.policy)
