"""Which instances are alive. Checks each of them periodically; legs that fail report it sooner."""

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
from kvferry.router.instances.facts import ask_about, is_router, process_of
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

_NEW_ONES_S = 0.05
"""How soon an instance that was added is looked at."""

_CONNECTOR_ASKED = re.compile(rb"^vllm:external_prefix_cache_queries_total(?:\{[^\n]*\})? ([0-9.e+]+)$", re.M)
"""Tokens for which vLLM's scheduler has asked its connector; 0 without one."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_PROBED_MODEL = "kvferry-probe"
"""Asked of an instance whose models nobody knows: its refusal is an answer too."""


class Health:
    """Tells instances how they are. One that is well and not known yet is asked about itself, so that no request has to
    wait for that; again when another process answers for it, and each time, while its stores take no KV. One that left
    a request without an answer gets a request of the router's own, and one that answered without a ticket is looked at
    for a connector."""

    def __init__(self, pools: Pools, connections: Connections, config: RouterConfig, clock: Clock) -> None:
        self._pools, self._connections, self._config, self._clock = pools, connections, config, clock
        self._warned: WeakKeyDictionary[Instance, str] = WeakKeyDictionary()
        """What was last warned of, by instance."""

    async def first_look(self) -> None:
        """Check all instances before requests come; does not wait long for those that do not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_timeout_s):
                await self.look(self._pools)

    async def watch(self) -> None:
        """Check every instance periodically; runs until it is cancelled. A slow one does not delay the others."""
        watching: dict[Instance, asyncio.Task[None]] = {}
        at_once = False  # `first_look` has looked at the first ones
        async with asyncio.TaskGroup() as group:
            while True:
                here = OrderedSet(self._pools)
                for instance in here - watching.keys():
                    watching[instance] = group.create_task(self._watch_one(instance, at_once=at_once))
                for instance in [one for one in watching if one not in here]:
                    watching.pop(instance).cancel()
                at_once = True
                await asyncio.sleep(min(_NEW_ONES_S, self._config.health_interval_s))

    async def look(self, instances: Iterable[Instance]) -> None:
        """Check each of them now."""
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(self._look_safely(instance))

    async def _watch_one(self, instance: Instance, *, at_once: bool) -> None:
        if at_once:
            await self._look_safely(instance)
        while True:
            if instance.state is not InstanceState.DEGRADED:  # Whether it is slow or gone is worth knowing soon.
                await asyncio.sleep(self._config.health_interval_s)
            await self._look_safely(instance)
            if instance.state is InstanceState.UNRESPONSIVE:
                await self._listen_to(instance)
            if instance.gave_no_ticket:
                await self._look_for_connector(instance)

    async def _look_safely(self, instance: Instance) -> None:
        try:
            await self._look_at(instance)
        except Exception:
            # The edge of this room: what one instance answers must not end the look-out for all.
            logger.exception("%s could not be checked", instance)

    async def _look_at(self, instance: Instance) -> None:
        timeout_s = self._config.health_timeout_s
        try:
            status, health = await self._connections.ask(instance, "GET", "/health", timeout_s)
        except TransferTimeout:
            self._is_late(instance)
            return
        except TransferError as error:  # also where this process is out of descriptors, which is then told here
            instance.is_down(str(error))
            return
        if is_router(health):
            instance.is_down("a router of kvferry's answers there, and no instance: name what is behind it")
            return
        if status != 200:
            instance.is_down(f"it answers GET /health with {status}")
            return
        instance.is_process(process_of(health))
        if isinstance(instance.confirmed, NotProbed) or not instance.stores_take_kv:
            try:
                facts = await ask_about(instance, self._connections, self._config.protocol, timeout_s)
            except ProtocolError as error:
                instance.is_down(str(error))
                return
            if not isinstance(facts, NotProbed):
                instance.learn(facts)
            elif self._config.protocol != "mooncake":
                self._is_late(instance)  # its health is all that it answers
                return
            self._warn_of_role(instance)
        instance.mark_healthy()
        instance.is_twin_of(self._twin(instance))

    def _is_late(self, instance: Instance) -> None:
        if self._clock.monotonic() - instance.last_sign >= self._config.health_timeout_s:  # Else only busy.
            instance.is_late(f"it does not answer for its health within {self._config.health_timeout_s:g} s")

    def _twin(self, instance: Instance) -> Instance | None:
        """Another instance of the same role that is the same process, and was here before."""
        if instance.draining:
            return None
        for other in self._pools.pool(instance.role).instances:
            if other is instance:
                return None
            if other.usable and _are_one(instance, other):
                return other
        return None

    async def _look_for_connector(self, instance: Instance) -> None:
        """A vLLM server without one computes prompts that D computes again; one with a connector that leaves the KV in
        a store answers without a ticket as well, and asks its connector for each prompt."""
        instance.gave_no_ticket = False
        try:
            status, text = await self._connections.ask(instance, "GET", "/metrics", self._config.health_timeout_s)
        except TransferError:
            return
        asked = _CONNECTOR_ASKED.findall(text)
        if status != 200 or any(float(value) for value in asked):
            return
        pool = self._pools.prefill
        if instance not in pool.without_tickets:
            logger.warning(
                "%s (%s) answers without a ticket%s: D would compute its prompts again, so requests are not split over"
                " it; start it with --kv-transfer-config, or leave it out. It is tried again every %d s",
                instance, instance.url, " and has no KV connector" if asked else "", NO_TICKETS_S,
            )  # fmt: skip
        pool.leave_out(instance, NO_TICKETS_S)

    async def _listen_to(self, instance: Instance) -> None:
        """Request one token; any answer but a server fault shows that the instance answers requests again."""
        facts = instance.facts
        names = facts.model_names if isinstance(facts, InstanceFacts | VllmFacts | SglangFacts) else []
        body = {"model": (names or [_PROBED_MODEL])[0], "prompt": [1], "max_tokens": 1}
        limit_s = self._config.first_byte_timeout_s
        try:
            status, _ = await self._connections.ask(
                instance, "POST", "/v1/completions", limit_s, msgspec.json.encode(body)
            )
        except TransferError as error:
            logger.info("%s still does not answer requests: %s", instance, error)
            return
        if status < 500 or status == 503:
            instance.mark_responsive()

    def _warn_of_role(self, instance: Instance) -> None:
        """A list of instances may have confused their URLs; without this, all that shows it is the reason `no_pair`."""
        facts, why = instance.facts, ""
        if isinstance(facts, UnknownFacts) and facts.refused:
            why = (
                "it does not tell this router what it is (401): start both with the same KVFERRY_AUTH_TOKEN, or give"
                " the router its key (--instance-api-key)"
            )
        elif isinstance(facts, InstanceFacts) and facts.role not in ("both", instance.role):
            why = f"it was started for {facts.role}"
        elif isinstance(facts, InstanceFacts) and facts.connector is None and self._pools.prefill.instances:
            why = "it has no connector"
        elif (
            isinstance(facts, InstanceFacts) and not facts.can_serve_as(instance.role) and self._pools.prefill.instances
        ):
            why = f"its {facts.connector} {'writes' if instance.role == 'prefill' else 'reads'} no tickets"
        if why and self._warned.get(instance) != why:
            logger.warning("%s (%s) takes no part in hand-offs: %s", instance, instance.url, why)
        self._warned[instance] = why


def _are_one(instance: Instance, other: Instance) -> bool:
    """Whether both are one process, by the id that kvferry's instances tell; of others' servers only this machine's own
    names are known to be one, as a proxy may serve several names at one address."""
    facts, others = instance.facts, other.facts
    if isinstance(facts, InstanceFacts) and isinstance(others, InstanceFacts) and facts.engine_id:
        return facts.engine_id == others.engine_id
    one, two = instance.address, other.address
    is_same_port = one.origin.port == two.origin.port and one.base_path == two.base_path
    return is_same_port and one.host in _LOOPBACK and two.host in _LOOPBACK
