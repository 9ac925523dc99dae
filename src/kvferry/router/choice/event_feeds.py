"""Follows the KV events of instances, and updates the prefix index with them.

kvferry's instances report the address of their events at /kvferry/instance (`kv_events`), SGLang's servers at
/server_info; for vLLM's servers, `--instance-kv-events` gives it. Owns one task per instance; an error in one task does
not end the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import aclosing

from kvferry.core.errors import ConfigError, MissingDependency
from kvferry.core.messages.instance_facts import EventsAddress, InstanceFacts
from kvferry.kv_events.messages import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvferry.kv_events.sockets import require_endpoint
from kvferry.kv_events.subscriber import FeedUpdate, Missed, Restarted, follow
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.instances.instance import Instance, SglangFacts, normalise_url
from kvferry.router.metrics import Metrics

logger = logging.getLogger(__name__)


class EventFeeds:
    """The feeds of all instances of a router."""

    retry_delay_s = 5.0
    """Seconds after which a feed that ended in an error is started again."""
    reconcile_interval_s = 1.0

    def __init__(
        self, instances: Iterable[Instance], index: PrefixIndex, metrics: Metrics, configured: Iterable[str]
    ) -> None:
        """`instances` is iterated again at each reconciliation. Raises `ConfigError` if a setting is not an address."""
        self._instances, self._index, self._metrics = instances, index, metrics
        self._configured = dict(parse_events_address(setting) for setting in configured)
        self._tasks: dict[Instance, tuple[EventsAddress, asyncio.Task[None]]] = {}

    async def watch(self) -> None:
        """Follow every instance that publishes events, also instances that join later. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._reconcile(group)
                await asyncio.sleep(self.reconcile_interval_s)

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        addresses = {
            instance: address for instance in self._instances if (address := self._address(instance)) is not None
        }
        for instance, (address, task) in list(self._tasks.items()):
            if addresses.get(instance) != address:
                task.cancel()
                del self._tasks[instance]
                self._index.cleared(instance)
        self._index.keep_only(self._instances)
        self._metrics.keep_only(self._instances)  # not only when metrics are scraped
        for instance, address in addresses.items():
            if instance not in self._tasks:
                self._tasks[instance] = (address, group.create_task(self._follow(instance, address)))

    def _address(self, instance: Instance) -> EventsAddress | None:
        if instance.url in self._configured:
            return self._configured[instance.url]
        facts = instance.facts
        if not isinstance(facts, InstanceFacts | SglangFacts) or facts.kv_events is None:
            return None
        return facts.kv_events.reachable_at(instance.address.host)

    async def _follow(self, instance: Instance, address: EventsAddress) -> None:
        num_errors = 0
        while True:
            try:
                async with aclosing(follow(address.endpoint, address.replay_endpoint)) as updates:
                    async for update in updates:
                        self._apply(instance, update)
            except MissingDependency as error:
                logger.warning("%s publishes KV events, which are not followed: %s", instance, error)
                return
            except Exception:
                # Events come from other processes: an event must not end this feed, or another one.
                if not num_errors:
                    logger.exception("the KV events of %s cannot be followed; trying again", instance)
                num_errors += 1
            self._index.cleared(instance)  # the events since the error are lost
            await asyncio.sleep(self.retry_delay_s)

    def _apply(self, instance: Instance, update: FeedUpdate) -> None:
        match update:
            case Restarted():
                self._index.cleared(instance)
            case Missed(num_messages=num):
                self._metrics.events_missed(instance, num)
            case _:
                for event in update:
                    self._apply_event(instance, event)
                self._metrics.events_received(instance, len(update))

    def _apply_event(self, instance: Instance, event: Event) -> None:
        """Apply an event, if it is about the device's memory and the first group of layers: prefix matching uses only
        these."""
        match event:
            case AllBlocksCleared():
                self._index.cleared(instance)
            case BlockStored() if _is_indexed(event.medium, event.group_idx) and not _has_extras(event):
                self._index.record_stored(
                    instance, event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size
                )
            case BlockRemoved() if _is_indexed(event.medium, event.group_idx):
                self._index.removed(instance, event.block_hashes)


def parse_events_address(setting: str) -> tuple[str, EventsAddress]:
    """Parse `http://instance:8000=tcp://instance:5557,tcp://instance:5558`; the replay address may be left out.

    Raises `ConfigError`.
    """
    url, equals, addresses = setting.partition("=")
    endpoint, _, replay = addresses.partition(",")
    if not equals:
        raise ConfigError(
            f"--instance-kv-events {setting!r} must be an instance's URL, =, and the address of its events, as in"
            " http://10.0.0.1:8000=tcp://10.0.0.1:5557"
        )
    for address in (endpoint, replay or endpoint):
        require_endpoint(address, "--instance-kv-events")
    return normalise_url(url), EventsAddress(endpoint=endpoint, replay_endpoint=replay or None)


def _is_indexed(medium: str | None, group: int | None) -> bool:
    return medium in (None, DEVICE) and group in (None, 0)


def _has_extras(event: BlockStored) -> bool:
    """True if the blocks depend on more than their tokens: adapters, salts, images."""
    return event.lora_id is not None or event.lora_name is not None or any(event.extra_keys or ())
