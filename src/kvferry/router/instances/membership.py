"""Membership of instances: they are added, drained, removed and change roles while requests are served.

A draining instance gets no new requests. It is drained when it has no running request and no KV to be fetched, by the
count of each router of this port and by the instance's metrics. The routers of a port share the members
(`SharedState`), and each router updates its `Pools` from them. Owns the reading of the file that may list all
instances.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import ConfigError, TransferError
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.settings.files import FileTask, read_whole
from kvferry.http.errors import Unreachable
from kvferry.router.config import RouterConfig
from kvferry.router.errors import InstanceConflict, UnknownInstance
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import BOOTSTRAP_PORT, Instance, LegRole, normalise_url
from kvferry.router.instances.pools import Pools, configured_instances
from kvferry.router.instances.shared_state import MemberRow, SharedState

logger = logging.getLogger(__name__)

_FOLLOW_INTERVAL_S, _STEPS_PER_CHECK = 0.1, 5
"""Seconds between two updates from other routers; number of updates per check of the file and of draining instances."""
_BUSY = re.compile(
    rb"^(?:kvferry:num_hand_offs_held|vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs"
    rb"|sglang:num_(?:prefill_(?:bootstrap|inflight)|decode_(?:prealloc|transfer))_queue_reqs)"
    rb"(?:\{[^\n]*\})? +(\S+)",
    re.M,
)
"""Running requests and KV kept for other instances, in the metrics of kvferry, vLLM and SGLang."""

_PLAN, _REVISIONS = "fleet plan", "fleet revisions"
_LINE = re.compile(r"(prefill|decode)\s+(\S+)(?:\s+(\d{1,5}))?")

InstanceList = dict[str, tuple[LegRole, int]]
"""Role and bootstrap port, by URL."""


@dataclass(frozen=True)
class InstanceDeclaration:
    """An instance of a fleet, with its name in the fleet."""

    name: str
    role: LegRole
    url: str
    bootstrap_port: int | None = None
    unit: str = ""
    revision: str = ""
    draining: bool = False


class Membership:
    """Changes the members that all routers of this port share, and updates `Pools` from them."""

    def __init__(self, config: RouterConfig, pools: Pools, connections: Connections, state: SharedState) -> None:
        """The first router adds the configured instances; later routers find them. Raises `ConfigError` if the file of
        instances cannot be used, or if the configured instances are not enough for a router."""
        self._config, self._pools, self._connections, self._state = config, pools, connections, state
        self._last_text = self._last_error = ""
        path = config.instances_file or Path()
        self._file = FileTask(path, lambda: read_whole(path))
        with state.changing():
            if not state.fact("begun"):
                configured = configured_instances(config)
                for role, url, port in configured:
                    state.add_member(role, url, port)
                if config.instances_file is not None:
                    self._last_text = _read(config.instances_file)
                    self._apply(self._last_text, config.instances_file)
                state.set_fact("begun", "yes")
        self.follow()

    # Operators' changes.

    def add(self, role: LegRole, url: str, bootstrap_port: int = BOOTSTRAP_PORT) -> Instance:
        """Add an instance. It may be one that is draining: its running requests then finish under its old name. Raises
        `ConfigError` if the address is invalid, and `InstanceConflict` if the instance exists already."""
        url = normalise_url(url)
        with self._changing():
            existing = self._pools.find(url)
            if existing is not None and not existing.draining:
                raise InstanceConflict(f"{url} is here already as {existing.name}, {existing.role}")
            member = self._state.add_member(role, url, bootstrap_port)
            self.supersede(url)
        instance = self._pools.member(member)
        logger.warning("%s (%s) was added", instance, instance.url)
        return instance

    def register(self, role: LegRole, url: str, bootstrap_port: int) -> Instance:
        """Add an instance that registers itself, unless it has registered at another router since then."""
        with self._changing():
            existing = self._pools.staying(url)
            member = existing[0].member if existing else self._state.add_member(role, url, bootstrap_port)
        return self._pools.member(member)

    def drain(self, name_or_url: str) -> Instance:
        """Send an instance, identified by name or URL, no new requests. Raises `UnknownInstance`."""
        instance = self.find(name_or_url)
        if not instance.draining:
            self.retire(instance)
            logger.warning("%s (%s) is draining: it gets no new requests", instance, instance.url)
            if not self._pools.decode.alive():
                logger.warning("no decode instance is left: requests are answered with 503 until one is added")
        return instance

    def supersede(self, url: str) -> None:
        """Remove the draining instances at this URL as soon as they are drained, because a new instance replaces
        them."""
        for instance in [instance for instance in self._pools.leaving if instance.url == url]:
            self.retire(instance, remove_when_drained=True)

    def retire(self, instance: Instance, *, remove_when_drained: bool = False) -> None:
        """Drain it in all routers, and remove it once it is drained if `remove_when_drained`."""
        with self._changing():
            self._state.drain_member(instance.member, remove_when_drained=remove_when_drained)

    def remove(self, name_or_url: str, *, force: bool = False) -> Instance:
        """Remove a drained instance; with `force`, any instance. Raises `UnknownInstance` and `InstanceConflict`."""
        instance = self.find(name_or_url)
        self._require_own(instance)
        if not force and not instance.drained:
            raise InstanceConflict(
                f"{instance} is not drained; drain it first and wait, or remove it by force (--force)"
            )
        self.forget(instance)
        return instance

    def change_role(self, name_or_url: str, role: LegRole) -> Instance:
        """Give an instance another role, and return it. It gets requests of that role from now on, and finishes the
        others. Raises `UnknownInstance` and `InstanceConflict`."""
        before = self.find(name_or_url)
        if before.role == role:
            return before
        self._require_own(before)
        if before.draining:
            raise InstanceConflict(f"{before} is being drained; add it with its new role when that is done")
        facts = before.facts
        if isinstance(facts, InstanceFacts) and facts.role not in ("both", role):
            raise InstanceConflict(f"{before} was started as a {facts.role} instance, which cannot {role}")
        if isinstance(facts, InstanceFacts) and role == "prefill" and facts.connector is None:
            raise InstanceConflict(f"{before} was started without a connector, and cannot hand off")
        state = before.state
        with self._changing():
            self._state.drain_member(before.member, remove_when_drained=True)
            member = self._state.add_member(role, before.url, before.address.bootstrap_port)
        after = self._pools.member(member)
        after.inherit_from(before, state)
        logger.warning("%s (%s) is now %s", before, before.url, after)
        return after

    def declare(self, declared: Sequence[InstanceDeclaration], plan: str = "") -> None:
        """Replace the instances of the fleet: instances that are no longer declared have ended. Operators' changes of
        other instances stay. `plan`: a `FleetPlan` as JSON, or empty. Raises `ConfigError` for an invalid address, and
        `InstanceConflict` for a duplicate name or address; nothing has changed then."""
        urls = [normalise_url(entry.url) for entry in declared]
        for property_name, values in (("name", [entry.name for entry in declared]), ("URL", urls)):
            duplicates = [value for value, number in Counter(values).items() if number > 1]
            if duplicates:
                raise InstanceConflict(f"two instances have the {property_name} {duplicates[0][:200]!r}")
        with self._changing():
            self._store_fact(_PLAN, plan)
            revisions = {entry.name: entry.revision for entry in declared if entry.revision}
            self._store_fact(_REVISIONS, json.dumps(revisions))
            rows = [row for row in self._state.members() if row.declared]
            for row in rows:
                if row.url not in urls:
                    self._state.remove_member(row.id)
            for entry, url in zip(declared, urls, strict=True):
                self._declare(entry, url, [row for row in rows if row.url == url])

    def set_plan(self, plan: str) -> None:
        """Replace the fleet's plan only, as `declare` does."""
        with self._changing():
            self._store_fact(_PLAN, plan)

    def _store_fact(self, name: str, value: str) -> None:
        if value != self._state.get_fact(name):
            self._state.set_fact(name, value)

    def _declare(self, declared: InstanceDeclaration, url: str, rows: Sequence[MemberRow]) -> None:
        """Declare one instance. `rows`: its earlier declarations, one per role. A drained instance stays drained until
        it is no longer declared."""
        current = next((row for row in rows if not row.remove_when_drained), None)
        if current is not None and (current.name, current.unit) != (declared.name, declared.unit):
            for row in rows:  # another process is at its address
                self._state.remove_member(row.id)
            current = None
        former = None
        if current is not None and current.role != declared.role and not current.draining:
            former, current = current, None
            self._state.drain_member(former.id, remove_when_drained=True)
        if current is None:
            port = declared.bootstrap_port or BOOTSTRAP_PORT
            member = self._state.declare_member(declared.name, declared.role, url, port, declared.unit)
            if declared.draining:
                self._state.drain_member(member)
            self._inherit_state(member, former)
        elif declared.draining and not current.draining:
            self._state.drain_member(current.id)

    def _inherit_state(self, member: int, former: MemberRow | None) -> None:
        """Copy the state of a declared instance from its former role, if it had one."""
        if former is None:
            return
        old = self._pools.member(former.id)
        state = old.state
        self.follow()
        self._pools.member(member).inherit_from(old, state)

    def _require_own(self, instance: Instance) -> None:
        """Raise `InstanceConflict` if a fleet's controller manages the instance: it would undo a change."""
        if any(row.declared and row.id == instance.member for row in self._state.members()):
            raise InstanceConflict(
                f"{instance} belongs to a fleet, whose controller decides what becomes of it; see `kvferry fleet scale"
                " --help`"
            )

    def find(self, name_or_url: str) -> Instance:
        """The instance with this name or URL. Raises `UnknownInstance`."""
        self.refresh()
        for instance in self._pools:
            if name_or_url in (instance.name, instance.url) or name_or_url.rstrip("/") == instance.url:
                return instance
        raise UnknownInstance(f"no instance is called {name_or_url[:200]!r}; see GET /kvferry/instances")

    def forget(self, instance: Instance) -> None:
        """Remove an instance that is gone."""
        with self._changing():
            self._state.remove_member(instance.member)

    def at(self, url: str) -> list[Instance]:
        """The instances at this URL, without those that are removed once they are drained."""
        return self._pools.staying(url)

    def is_listed(self, url: str) -> bool:
        """True if the file lists this URL."""
        return url in self._listed()

    # Background tasks.

    async def watch(self) -> None:
        """Apply changes of other routers and of the file, and find drained instances. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_members())
            group.create_task(self._watch_file())

    async def _watch_file(self) -> None:
        while self._config.instances_file is not None:
            await asyncio.sleep(_FOLLOW_INTERVAL_S * _STEPS_PER_CHECK)
            try:
                await self.follow_file()
            except Exception:
                # The router goes on with the instances that it has.
                logger.exception("the file of instances could not be followed")

    async def _watch_members(self) -> None:
        steps = 0
        while True:
            await asyncio.sleep(_FOLLOW_INTERVAL_S)
            steps += 1
            try:
                self.refresh()
            except Exception:
                # The router goes on with the instances that it has.
                logger.exception("the instances could not be followed")
            if steps % _STEPS_PER_CHECK == 0:
                await asyncio.gather(
                    *(self._check_drained_safely(instance) for instance in self._pools if instance.draining)
                )

    def refresh(self) -> None:
        """Update the pools if another router has changed the members."""
        if self._state.has_changed():
            self.follow()

    def follow(self) -> None:
        """Update the pools from the shared members."""
        self._pools.fleet_plan.follow(self._state.get_fact(_PLAN))
        revisions = json.loads(self._state.get_fact(_REVISIONS) or "{}")
        remaining = {instance.member: instance for instance in self._pools}
        by_url = {instance.url: instance for instance in remaining.values()}
        for row in self._state.members():
            instance = remaining.pop(row.id, None)
            if instance is None:
                instance = self._pools.pool(row.role).add(
                    row.url,
                    row.bootstrap_port,
                    name=row.name,
                    member=row.id,
                    unit=row.unit,
                    predecessor=by_url.get(row.url),
                )
            instance.name, instance.settings_revision = row.name, revisions.get(row.name, "")
            if row.draining:
                self._pools.retire(instance)
                instance.remove_when_drained = row.remove_when_drained
                instance.set_drained(row.drained)
        for removed in remaining.values():
            self._pools.retire(removed)
            self._pools.forget(removed)
            if not any(instance.address.origin == removed.address.origin for instance in self._pools):
                self._connections.close(removed)
            logger.warning("%s (%s) was removed", removed, removed.url)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Update the pools before and after a change of the shared members."""
        with self._state.changing():
            self.refresh()
            yield
            self.follow()

    async def _check_drained_safely(self, instance: Instance) -> None:
        try:
            await self.check_drained(instance)
        except Exception:
            # Answers come from other processes: an answer must not prevent other instances from being drained.
            logger.exception("could not find out whether %s is drained", instance)

    async def check_drained(self, instance: Instance) -> None:
        """Check if a draining instance is drained, and remove it if it is to be removed then. Raises the error of its
        answer."""
        self._state.note_idle(instance.member, not instance.is_in_use)
        drained = await self._is_idle(instance) and self._state.all_idle(instance.member) and not instance.is_in_use
        if instance not in self._pools.leaving:
            return  # it was removed meanwhile
        if drained and not instance.drained:
            logger.warning(
                "%s (%s) is drained: nothing runs there, and it holds no KV for others", instance, instance.url
            )
        if drained and instance.remove_when_drained:
            self.forget(instance)
        elif drained != instance.drained:
            with self._changing():
                self._state.set_drained(instance.member, drained)

    async def _is_idle(self, instance: Instance) -> bool:
        """True if it is idle, by the router's count and the process's metrics, which include other routers' requests.

        The metrics cover all roles of a process, so they are not used if the process continues in another role. A
        process that is gone is idle, whether it refuses connections or `Health` has given it up.
        """
        same_process = [other for other in self._pools if other.url == instance.url]
        if not all(other.draining for other in same_process):
            return not (instance.is_in_use or self._state.has_tickets_of(instance.member))
        if any(other.is_in_use for other in same_process):
            return False
        try:
            status, text = await self._connections.metrics(instance, self._config.health_timeout_s)
        except Unreachable:
            return True
        except TransferError:
            return bool(instance.checks.trouble)
        return status == 404 or (status == 200 and not any(map(_is_positive, _BUSY.findall(text))))

    # The file.

    def _listed(self) -> InstanceList:
        """The content of the file when it was last applied, by any router."""
        path = self._config.instances_file
        return {} if path is None else _parse(self._state.fact("instances file"), path)

    async def follow_file(self) -> None:
        """Apply the changes of the file, if there is one, once two checks have found the same content."""
        path = self._config.instances_file
        if path is None:
            return
        try:
            text = _text(path, await self._file.run())
        except ConfigError as error:
            self._log_error(error)
            return
        is_settled, self._last_text = text == self._last_text, text
        if not is_settled:  # it may be half written
            return
        try:
            with self._changing():
                if text != self._state.fact("instances file"):
                    self._apply(text, path)
            self._last_error = ""
        except ConfigError as error:
            self._log_error(error)

    def _log_error(self, error: ConfigError) -> None:
        if str(error) != self._last_error:
            logger.error("the instances are not changed: %s", error)
        self._last_error = str(error)

    def _apply(self, text: str, path: Path) -> None:
        """Apply the changes of the file since it was last applied; operators' changes of other instances stay. Raises
        `ConfigError`."""
        listed = _parse(text, path)
        config, state = self._config, self._state
        has_decode = config.decode_url or config.registration or any(role == "decode" for role, _ in listed.values())
        if not has_decode:
            raise ConfigError(f"{path} names no decode instance; a router needs at least one ('decode URL')")
        if not listed:
            raise ConfigError(f"{path} names no instance; if that is intended, use `kvferry fleet drain` instead")
        former = self._listed()
        state.set_fact("instances file", text)
        current = {(row.url, row.role) for row in state.members() if not row.draining}
        for row in state.members():
            was_listed, is_listed = former.get(row.url), listed.get(row.url)
            if was_listed is not None and is_listed != was_listed and is_listed != (row.role, row.bootstrap_port):
                state.drain_member(row.id, remove_when_drained=True)
        for url, (role, port) in listed.items():
            if former.get(url) != (role, port) and (url, role) not in current:
                state.add_member(role, url, port)


def _read(path: Path) -> str:
    """Read the file of instances. Raises `ConfigError`."""
    try:
        return _text(path, read_whole(path))
    except ConfigError as error:
        raise ConfigError(f"--instances-file {error}") from error


def _text(path: Path, content: bytes) -> str:
    """Decode the file of instances. Raises `ConfigError`."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _is_positive(value: bytes) -> bool:
    """True if a metric's value is not 0. A value that is not a number counts as not 0."""
    try:
        return float(value) != 0
    except ValueError:
        return True


def _parse(text: str, path: Path) -> InstanceList:
    """Parse `prefill URL [BOOTSTRAP-PORT]` or `decode URL` on each line; # begins a comment. Raises `ConfigError`."""
    listed: InstanceList = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ConfigError(f"{path}, line {number}: {entry[:80]!r} is not 'prefill URL' or 'decode URL'")
        role: LegRole = "prefill" if match[1] == "prefill" else "decode"
        url = normalise_url(match[2])
        if url in listed:
            raise ConfigError(f"{path}, line {number}: {url} is listed twice")
        listed[url] = role, int(match[3] or BOOTSTRAP_PORT)
    return listed
