"""Reads what a policy wants to know of a request, and asks it.

Owns what all requests share: the policy, the index of prefixes, the estimates, the threshold, the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

from kvferry.core.clock import Clock
from kvferry.http.headers import RawHeaders, find_header
from kvferry.observe.tracing import make_tracer
from kvferry.router.body import RequestBody
from kvferry.router.config import RouterConfig
from kvferry.router.cost import Estimates
from kvferry.router.decisions import Decision, Decisions
from kvferry.router.disaggregation import Threshold
from kvferry.router.instance import Facts, Instance, InstanceFacts, SglangFacts, VllmFacts
from kvferry.router.paths import PROMPT_FIELDS
from kvferry.router.policies.base import Asked, Choice, Options, PolicyContext
from kvferry.router.policies.table import make_policy
from kvferry.router.prefix_index import PrefixIndex
from kvferry.router.prompt import Prefix, is_token_ids, read_token_ids, text_prefix

_LONGEST_SESSION = 256
_BEFORE_THE_PROMPT = ("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs", "documents", "functions")
"""Fields that decide about the KV of a prompt's first token."""


class Chooser:
    """One of a router."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        """Raises `ConfigError` when there is no such policy, or it has no such option."""
        self._config, self.clock = config, clock
        self.index, self.estimates = PrefixIndex(config.prefix_index_entries), Estimates()
        self.threshold = Threshold(self.estimates, self.index, config.fixed_threshold)
        context = PolicyContext(clock, Random(), self.index, self.estimates, self.threshold)
        self.policy = make_policy(config.policy, context, config.policy_option)
        self.decisions = Decisions(config.max_decisions, clock)
        self._known: WeakKeyDictionary[Instance, Facts] = WeakKeyDictionary()
        self.tracer = make_tracer(config.otlp_traces_endpoint, "kvferry-router")
        self.on_placed: Callable[[Asked, Choice[Instance]], None] | None = None
        """Told of each choice."""
        self._session_header = config.session_header.lower().encode()

    def read(self, path: str, body: RequestBody, headers: RawHeaders) -> Asked:
        """What a policy sees of a POST to one of `PROMPT_FIELDS`."""
        text = body.raw(PROMPT_FIELDS[path])
        model, limit = body.get("model"), body.get("max_completion_tokens") or body.get("max_tokens")
        num_tokens, token_ids, are_ids = len(text) / self.estimates.bytes_per_token, None, is_token_ids(text)
        if are_ids:
            num_tokens = text.count(b",") + 1.0
            if self.index.wants_token_ids and not body.raw("cache_salt"):
                token_ids = read_token_ids(text)
        root = b"\0".join((path.encode(), *map(body.raw, _BEFORE_THE_PROMPT)))
        return Asked(
            model=model if isinstance(model, str) else "",
            num_tokens=int(num_tokens),
            num_bytes=0 if are_ids else len(text),
            max_tokens=limit if isinstance(limit, int) else None,
            streams=body.get("stream") is True,
            session=self._session(body, headers),
            prefix=text_prefix(text, root, num_tokens / max(1, len(text)), token_ids),
        )

    def record(self, path: str, asked: Asked, request_id: bytes, arrived: float) -> Decision:
        """Of a request that is about to be given its place; it is kept from now on."""
        decision = Decision(
            request_id=request_id.decode(errors="replace"),
            path=path,
            policy=self._config.policy,
            model=asked.model[:200],
            prompt_tokens=asked.num_tokens,
            has_session=asked.session is not None,
        )
        decision.timings.arrived = arrived
        return decision

    def cached(self, asked: Asked) -> Mapping[Any, int]:
        """How many tokens of the prompt each instance seems to have."""
        return self.index.match(asked.prefix)

    def choose(self, asked: Asked, options: Options[Instance]) -> Choice[Instance]:
        """What the policy says; the instances will have the prompt's KV."""
        for instance in (*options.prefills, *options.decodes):
            if self._known.get(instance) is not instance.facts:
                self._note_facts(instance, instance.facts)
        choice = self.policy.choose(asked, _serving(asked.model, options))
        for one in (choice.prefill, choice.decode):
            if one is not None:
                self.index.served(one, asked.prefix)
        self.policy.placed(asked, choice)
        if self.on_placed is not None:
            self.on_placed(asked, choice)
        return choice

    def placed_elsewhere(self, prefix: Prefix, session: str | None, prefill: Instance | None, decode: Instance) -> None:
        """Another process of this router has chosen."""
        asked = Asked(session=session, prefix=prefix)
        for one in (prefill, decode):
            if one is not None:
                self.index.served(one, asked.prefix)
        self.policy.placed(asked, Choice(decode, prefill))

    def _note_facts(self, instance: Instance, facts: Facts) -> None:
        """Something new is known of it: it may be another process, with an empty cache."""
        if not isinstance(facts, InstanceFacts | VllmFacts):
            return
        before = self._known.get(instance)
        if isinstance(before, InstanceFacts) and getattr(facts, "engine_id", None) != before.engine_id:
            self.index.cleared(instance)
        if facts.num_kv_tokens:
            self.index.set_capacity(instance, facts.num_kv_tokens)
        self._known[instance] = facts

    def _session(self, body: RequestBody, headers: RawHeaders) -> str | None:
        found = find_header(headers, self._session_header)
        named = found.decode("latin-1") if found else body.get("user")
        return named[:_LONGEST_SESSION] if isinstance(named, str) and named else None


def _serving(model: str, options: Options[Instance]) -> Options[Instance]:
    return Options(
        with_model(model, options.prefills),
        with_model(model, options.decodes),
        options.may_stay_whole,
        options.can_pair,
    )


def with_model(model: str, instances: Iterable[Instance]) -> list[Instance]:
    """Without those that serve other models only, as far as is known. Where nobody is known to have it, all stay: an
    adapter may have come since, and an instance says best that a model is not there."""
    everyone = list(instances)
    return [one for one in everyone if model in _models(one.facts)] or everyone if model else everyone


def _models(facts: Facts) -> list[str]:
    return facts.model_names if isinstance(facts, (InstanceFacts, VllmFacts, SglangFacts)) else []
