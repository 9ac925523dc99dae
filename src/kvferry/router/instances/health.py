"""Health checks of instances. Each instance is checked periodically; legs that fail cause an earlier check."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import ProtocolError, TransferError, TransferTimeout
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.ordered_set import OrderedSet
from kvferry.router.config import RouterConfig
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.facts import engine_id_of, fetch_facts, is_router
from kvferry.router.instances.instance import (
    Instance,
    InstanceState,
    NotProbed,
    SglangFacts,
    UnknownFacts,
    VllmFacts,
)
from kvferry.router.instances.pools import NO_TICKETS_S, Pools

logger = logging.getLogger(__name__)


_CONNECTOR_QUERIES = re.compile(rb"^vllm:external_prefix_cache_queries_total(?:\{[^\n]*\})? ([0-9.e+]+)$", re.M)
"""Tokens for which vLLM's scheduler has queried its connector; 0 without a connector."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_PROBED_MODEL = "kvferry-probe"
"""Model in the probe of an instance whose models are unknown: its refusal is an answer too."""


class Health:
    """Updates the state of instances.

    The facts of a healthy instance are fetched before any request needs them; They are fetched again when another
    process answers at its address, and with each check while its stores take no KV. An instance that left a request
    without an answer gets a probe request, and one that answered without a ticket is checked for a connector."""

    new_instance_poll_s = 0.05
    """Seconds until a new instance is probed."""

    def __init__(self, pools: Pools, connections: Connections, config: RouterConfig, clock: Clock) -> None:
        self._pools, self._connections, self._config, self._clock = pools, connections, config, clock
        self._warned: WeakKeyDictionary[Instance, str] = WeakKeyDictionary()
        """The last warning, by instance."""

    async def probe_all(self) -> None:
        """Probe all instances before requests come, within `health_timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_timeout_s):
                await self.probe(self._pools)

    async def watch(self) -> None:
        """Probe every instance periodically. Runs until cancelled. A slow instance does not delay the others."""
        watching: dict[Instance, asyncio.Task[None]] = {}
        immediately = False  # `probe_all` has probed the first instances
        async with asyncio.TaskGroup() as group:
            while True:
                current = OrderedSet(self._pools)
                for instance in current - watching.keys():
                    watching[instance] = group.create_task(self._watch_instance(instance, immediately=immediately))
                for instance in [watched for watched in watching if watched not in current]:
                    watching.pop(instance).cancel()
                immediately = True
                await asyncio.sleep(min(self.new_instance_poll_s, self._config.health_interval_s))

    async def probe(self, instances: Iterable[Instance]) -> None:
        """Probe each of them now."""
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(self._probe_safely(instance))

    async def _watch_instance(self, instance: Instance, *, immediately: bool) -> None:
        if immediately:
            await self._probe_safely(instance)
        while True:
            if instance.state is not InstanceState.DEGRADED:  # slow or gone: find out soon
                await asyncio.sleep(self._config.health_interval_s)
            await self._probe_safely(instance)
            if instance.state is InstanceState.UNRESPONSIVE:
                await self._probe_with_request(instance)
            if instance.process.gave_no_ticket:
                await self._check_connector(instance)

    async def _probe_safely(self, instance: Instance) -> None:
        try:
            await self._probe(instance)
        except Exception:
            # Answers come from other processes: an answer must not end the checks of all instances.
            logger.exception("%s could not be checked", instance)

    async def _probe(self, instance: Instance) -> None:
        timeout_s = self._config.health_timeout_s
        try:
            status, health = await self._connections.ask(instance, "GET", "/health", timeout_s)
        except TransferTimeout:
            self._on_late(instance)
            return
        except TransferError as error:  # also if this process has no free descriptors
            instance.mark_down(str(error))
            return
        if is_router(health):
            instance.mark_down("a router of kvferry's answers there, and no instance: name what is behind it")
            return
        if status != 200:
            instance.mark_down(f"it answers GET /health with {status}")
            return
        instance.set_engine_id(engine_id_of(health))
        if isinstance(instance.confirmed, NotProbed) or not instance.stores_take_kv:
            try:
                facts = await fetch_facts(instance, self._connections, self._config.protocol, timeout_s)
            except ProtocolError as error:
                instance.mark_down(str(error))
                return
            if not isinstance(facts, NotProbed):
                instance.record_probe(facts)
            elif self._config.protocol != "mooncake":
                self._on_late(instance)  # it answers only health checks
                return
            self._warn_of_no_part(instance)
        instance.mark_healthy()
        instance.mark_duplicate(self._find_duplicate(instance))

    def _on_late(self, instance: Instance) -> None:
        if self._clock.monotonic() - instance.last_progress >= self._config.health_timeout_s:  # else it is only busy
            instance.record_late_check(f"it does not answer for its health within {self._config.health_timeout_s:g} s")

    def _find_duplicate(self, instance: Instance) -> Instance | None:
        """An earlier instance of the same role that is the same process; None: there is none."""
        if instance.draining:
            return None
        for other in self._pools.pool(instance.role).instances:
            if other is instance:
                return None
            if other.usable and _are_same_process(instance, other):
                return other
        return None

    async def _check_connector(self, instance: Instance) -> None:
        """Exclude a vLLM server without a connector from hand-offs: D would compute its prompts again. A connector that
        leaves the KV in a store answers without a ticket too, but is queried for each prompt."""
        instance.process.gave_no_ticket = False
        try:
            status, text = await self._connections.ask(instance, "GET", "/metrics", self._config.health_timeout_s)
        except TransferError:
            return
        queries = _CONNECTOR_QUERIES.findall(text)
        if status != 200 or any(float(value) for value in queries):
            return
        pool = self._pools.prefill
        if instance not in pool.hand_off_exclusions:
            logger.warning(
                "%s (%s) answers without a ticket%s: D would compute its prompts again, so requests are not split over"
                " it; start it with --kv-transfer-config, or leave it out. It is tried again every %d s",
                instance, instance.url, " and has no KV connector" if queries else "", NO_TICKETS_S,
            )  # fmt: skip
        pool.exclude_from_hand_off(instance, NO_TICKETS_S)

    async def _probe_with_request(self, instance: Instance) -> None:
        """Request one token; any answer but a server error shows that the instance answers requests again."""
        facts = instance.facts
        names = facts.model_names if isinstance(facts, InstanceFacts | VllmFacts | SglangFacts) else []
        body = {"model": (names or [_PROBED_MODEL])[0], "prompt": [1], "max_tokens": 1}
        timeout_s = self._config.first_byte_timeout_s
        try:
            status, _ = await self._connections.ask(
                instance, "POST", "/v1/completions", timeout_s, msgspec.json.encode(body)
            )
        except TransferError as error:
            logger.info("%s still does not answer requests: %s", instance, error)
            return
        if status < 500 or status == 503:
            instance.mark_responsive()

    def _warn_of_no_part(self, instance: Instance) -> None:
        """Log a warning about an instance that takes no part in hand-offs, for example because the URLs of the roles
        were swapped."""
        facts, reason = instance.facts, ""
        if isinstance(facts, UnknownFacts) and facts.refused:
            reason = (
                "it does not tell this router what it is (401): start both with the same KVFERRY_AUTH_TOKEN, or give"
                " the router its key (--instance-api-key)"
            )
        elif isinstance(facts, InstanceFacts) and facts.role not in ("both", instance.role):
            reason = f"it was started for {facts.role}"
        elif isinstance(facts, InstanceFacts) and facts.connector is None and self._pools.prefill.instances:
            reason = "it has no connector"
        elif (
            isinstance(facts, InstanceFacts) and not facts.can_serve_as(instance.role) and self._pools.prefill.instances
        ):
            reason = f"its {facts.connector} {'writes' if instance.role == 'prefill' else 'reads'} no tickets"
        if reason and self._warned.get(instance) != reason:
            logger.warning("%s (%s) takes no part in hand-offs: %s", instance, instance.url, reason)
        self._warned[instance] = reason


def _are_same_process(instance: Instance, other: Instance) -> bool:
    """True if both are the same process: by the id of kvferry's instances; of other servers only if both hosts are this
    machine's loopback, as a proxy may serve several names at one address."""
    facts, other_facts = instance.facts, other.facts
    if isinstance(facts, InstanceFacts) and isinstance(other_facts, InstanceFacts) and facts.engine_id:
        return facts.engine_id == other_facts.engine_id
    address, other_address = instance.address, other.address
    is_same_port = address.origin.port == other_address.origin.port and address.base_path == other_address.base_path
    return is_same_port and address.host in _LOOPBACK and other_address.host in _LOOPBACK
