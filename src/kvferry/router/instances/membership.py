"""Which instances there are: they are added, drained, removed and given another role while requests are served.

A draining instance gets no new requests. It is drained when no request runs there and nobody may fetch from it any
more, by the count of each router of this port and by the instance's metrics. The members are what these routers share
(`SharedState`); each makes its `Pools` follow them. Owns the file that may list all instances.
"""

from __future__ import annotations

import asyncio
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
from kvferry.router.instances.pools import Pools, given_instances
from kvferry.router.instances.shared_state import MemberRow, SharedState

logger = logging.getLogger(__name__)

_FOLLOW_S, _LOOK_STEPS = 0.1, 5
"""How often other routers are followed, and every how many times the file and draining instances are looked at."""
_BUSY = re.compile(
    rb"^(?:kvferry:num_hand_offs_held|vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs"
    rb"|sglang:num_(?:prefill_(?:bootstrap|inflight)|decode_(?:prealloc|transfer))_queue_reqs)"
    rb"(?:\{[^\n]*\})? +(\S+)",
    re.M,
)
"""What runs at an instance, and what it keeps for others, in the metrics of kvferry, vLLM and SGLang."""

_PLAN = "fleet plan"
_LINE = re.compile(r"(prefill|decode)\s+(\S+)(?:\s+(\d{1,5}))?")

Wanted = dict[str, tuple[LegRole, int]]
"""Role and bootstrap port, by URL."""


@dataclass(frozen=True)
class Declared:
    """An instance of a fleet, under the name that the fleet has for it."""

    name: str
    role: LegRole
    url: str
    bootstrap_port: int | None = None
    unit: str = ""
    draining: bool = False


class Membership:
    """Changes what all routers of this port know of members, and makes `Pools` follow it."""

    def __init__(self, config: RouterConfig, pools: Pools, connections: Connections, state: SharedState) -> None:
        """The first router decides about the instances it was given; later ones find them. Raises `ConfigError` if
        there is a file of instances and it cannot be used, or if the given instances are not enough for a router."""
        self._config, self._pools, self._connections, self._state = config, pools, connections, state
        self._last_text = self._last_error = ""
        path = config.instances_file or Path()
        self._file = FileTask(path, lambda: read_whole(path))
        with state.changing():
            if not state.fact("begun"):
                given = given_instances(config)
                for role, url, port in given:
                    state.add_member(role, url, port)
                if config.instances_file is not None:
                    self._last_text = _read(config.instances_file)
                    self._apply(self._last_text, config.instances_file)
                state.set_fact("begun", "yes")
        self.follow()

    # What operators ask.

    def add(self, role: LegRole, url: str, bootstrap_port: int = BOOTSTRAP_PORT) -> Instance:
        """Add an instance, or take one back that is drained: what runs there is finished under its old name. Raises
        `ConfigError` if the address is invalid, and `InstanceConflict` if the instance is already here."""
        url = normalise_url(url)
        with self._changing():
            known = self._pools.find(url)
            if known is not None and not known.draining:
                raise InstanceConflict(f"{url} is here already as {known.name}, {known.role}")
            member = self._state.add_member(role, url, bootstrap_port)
            self.supersede(url)
        instance = self._pools.member(member)
        logger.warning("%s (%s) was added", instance, instance.url)
        return instance

    def register(self, role: LegRole, url: str, bootstrap_port: int) -> Instance:
        """Add an instance that registers itself, unless it has done so at another router meanwhile."""
        with self._changing():
            here = next((one for one in self._pools if one.url == url and not one.remove_when_drained), None)
            member = self._state.add_member(role, url, bootstrap_port) if here is None else here.member
        return self._pools.member(member)

    def drain(self, named: str) -> Instance:
        """Send an instance, given by name or URL, no new requests. Raises `UnknownInstance`."""
        instance = self.find(named)
        if not instance.draining:
            self.retire(instance)
            logger.warning("%s (%s) is draining: it gets no new requests", instance, instance.url)
            if not self._pools.decode.alive():
                logger.warning("no decode instance is left: requests are answered with 503 until one is added")
        return instance

    def supersede(self, url: str) -> None:
        """Instances at this URL that are draining are forgotten as soon as they are drained: there is a new one."""
        for one in [one for one in self._pools.leaving if one.url == url]:
            self.retire(one, remove_when_drained=True)

    def retire(self, instance: Instance, *, remove_when_drained: bool = False) -> None:
        """Send it no new requests, from any router; and remove it once it is drained, if it `remove_when_drained`."""
        with self._changing():
            self._state.drain_member(instance.member, remove_when_drained=remove_when_drained)

    def remove(self, named: str, *, force: bool = False) -> Instance:
        """Remove a drained instance; with `force`, one that still works. Raises `UnknownInstance` and
        `InstanceConflict`."""
        instance = self.find(named)
        self._require_own(instance)
        if not force and not instance.drained:
            raise InstanceConflict(
                f"{instance} is not drained; drain it first and wait, or remove it by force (--force)"
            )
        self.forget(instance)
        return instance

    def change_role(self, named: str, role: LegRole) -> Instance:
        """The instance with its new role. It gets requests of that role from now on, and finishes the others. Raises
        `UnknownInstance` and `InstanceConflict`."""
        before = self.find(named)
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

    def declare(self, wanted: Sequence[Declared], plan: str = "") -> None:
        """Make these the instances of the fleet; those that were declared before and are missing now have ended. What
        operators did about other instances stays. `plan`: a `FleetPlan` as JSON, or empty. Raises `ConfigError` for an
        address that is none, and `InstanceConflict` for two of one name or address; nothing has changed then."""
        urls = [normalise_url(one.url) for one in wanted]
        for what, values in (("name", [one.name for one in wanted]), ("URL", urls)):
            twice = [one for one, number in Counter(values).items() if number > 1]
            if twice:
                raise InstanceConflict(f"two instances have the {what} {twice[0][:200]!r}")
        with self._changing():
            self._set_plan(plan)
            rows = [one for one in self._state.members() if one.declared]
            for row in rows:
                if row.url not in urls:
                    self._state.remove_member(row.id)
            for one, url in zip(wanted, urls, strict=True):
                self._declare(one, url, [row for row in rows if row.url == url])

    def take_plan(self, plan: str) -> None:
        """What the fleet is to be, as `declare` takes it; nothing is said about its instances."""
        with self._changing():
            self._set_plan(plan)

    def _set_plan(self, plan: str) -> None:
        if plan != self._state.known_fact(_PLAN):
            self._state.set_fact(_PLAN, plan)

    def _declare(self, wanted: Declared, url: str, rows: Sequence[MemberRow]) -> None:
        """`rows`: the same process as it was declared before, in each of its roles. One that was drained stays so until
        it is declared no more."""
        here = next((row for row in rows if not row.remove_when_drained), None)
        if here is not None and (here.name, here.unit) != (wanted.name, wanted.unit):
            for row in rows:  # another process is at its address
                self._state.remove_member(row.id)
            here = None
        before = None
        if here is not None and here.role != wanted.role and not here.draining:
            before, here = here, None
            self._state.drain_member(before.id, remove_when_drained=True)
        if here is None:
            port = wanted.bootstrap_port or BOOTSTRAP_PORT
            member = self._state.declare_member(wanted.name, wanted.role, url, port, wanted.unit)
            if wanted.draining:
                self._state.drain_member(member)
            self._take_after(member, before)
        elif wanted.draining and not here.draining:
            self._state.drain_member(here.id)

    def _take_after(self, member: int, before: MemberRow | None) -> None:
        """An instance that was declared is known already, if it was here in another role."""
        if before is None:
            return
        old = self._pools.member(before.id)
        state = old.state
        self.follow()
        self._pools.member(member).inherit_from(old, state)

    def _require_own(self, instance: Instance) -> None:
        """Raise `InstanceConflict` if a fleet's controller decides about it: it would undo what is done here."""
        if any(one.declared and one.id == instance.member for one in self._state.members()):
            raise InstanceConflict(
                f"{instance} belongs to a fleet, whose controller decides what becomes of it; see `kvferry fleet scale"
                " --help`"
            )

    def find(self, named: str) -> Instance:
        """The instance with this name or URL. Raises `UnknownInstance`."""
        self.catch_up()
        for instance in self._pools:
            if named in (instance.name, instance.url) or named.rstrip("/") == instance.url:
                return instance
        raise UnknownInstance(f"no instance is called {named[:200]!r}; see GET /kvferry/instances")

    def forget(self, instance: Instance) -> None:
        """Forget an instance that is gone."""
        with self._changing():
            self._state.remove_member(instance.member)

    def at(self, url: str) -> list[Instance]:
        """The instances at this URL, but for those that leave once they are drained."""
        return [one for one in self._pools if one.url == url and not one.remove_when_drained]

    def names(self, url: str) -> bool:
        """Whether the file lists this URL."""
        return url in self._wanted()

    # What happens by itself.

    async def watch(self) -> None:
        """Follow other routers and the file, and notice which instances are drained; runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_members())
            group.create_task(self._watch_file())

    async def _watch_file(self) -> None:
        while self._config.instances_file is not None:
            await asyncio.sleep(_FOLLOW_S * _LOOK_STEPS)
            try:
                await self.follow_file()
            except Exception:
                # The edge of this room, as below.
                logger.exception("the file of instances could not be followed")

    async def _watch_members(self) -> None:
        steps = 0
        while True:
            await asyncio.sleep(_FOLLOW_S)
            steps += 1
            try:
                self.catch_up()
            except Exception:
                # The edge of this room: the router serves on with the instances that it has.
                logger.exception("the instances could not be followed")
            if steps % _LOOK_STEPS == 0:
                await asyncio.gather(*(self._look_safely(one) for one in self._pools if one.draining))

    def catch_up(self) -> None:
        """Follow what other routers did."""
        if self._state.has_changed():
            self.follow()

    def follow(self) -> None:
        """Make the pools those that all routers share."""
        self._pools.directions.follow(self._state.known_fact(_PLAN))
        here = {one.member: one for one in self._pools}
        at = {one.url: one for one in here.values()}
        for row in self._state.members():
            instance = here.pop(row.id, None)
            if instance is None:
                instance = self._pools.pool(row.role).add(
                    row.url,
                    row.bootstrap_port,
                    name=row.name,
                    member=row.id,
                    unit=row.unit,
                    before=at.get(row.url),
                )
            instance.name = row.name
            if row.draining:
                self._pools.retire(instance)
                instance.remove_when_drained = row.remove_when_drained
                instance.is_drained(row.drained)
        for gone in here.values():
            self._pools.retire(gone)
            self._pools.forget(gone)
            if not any(one.address.origin == gone.address.origin for one in self._pools):
                self._connections.close(gone)
            logger.warning("%s (%s) was removed", gone, gone.url)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The pools are those of all routers before the change, and after it."""
        with self._state.changing():
            self.catch_up()
            yield
            self.follow()

    async def _look_safely(self, instance: Instance) -> None:
        try:
            await self._look_at(instance)
        except Exception:
            # Likewise: what one instance answers must not keep another from being drained.
            logger.exception("could not find out whether %s is drained", instance)

    async def _look_at(self, instance: Instance) -> None:
        self._state.note_idle(instance.member, not instance.is_held)
        drained = await self._is_idle(instance) and self._state.all_idle(instance.member) and not instance.is_held
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
        """Whether it is idle, by the router's count and the process's metrics, which also show other routers' requests.

        These metrics cover all roles of one process, so they are not used if the process continues with another role. A
        process that is gone is idle, whether it refuses connections or `Health` has given it up.
        """
        same = [one for one in self._pools if one.url == instance.url]
        if not all(one.draining for one in same):
            return not (instance.is_held or self._state.has_tickets_of(instance.member))
        if any(one.is_held for one in same):
            return False
        try:
            status, text = await self._connections.metrics(instance, self._config.health_timeout_s)
        except Unreachable:
            return True
        except TransferError:
            return bool(instance.looks.trouble)
        return status == 404 or (status == 200 and not any(map(_is_some, _BUSY.findall(text))))

    # The file.

    def _wanted(self) -> Wanted:
        """What the file said when it was last applied, by any router."""
        path = self._config.instances_file
        return {} if path is None else _parse(self._state.fact("instances file"), path)

    async def follow_file(self) -> None:
        """Apply what has changed in the file, if there is one, and it was the same at the last look."""
        path = self._config.instances_file
        if path is None:
            return
        try:
            text = _text(path, await self._file.run())
        except ConfigError as error:
            self._keep(error)
            return
        is_settled, self._last_text = text == self._last_text, text
        if not is_settled:  # someone may be in the middle of writing it
            return
        try:
            with self._changing():
                if text != self._state.fact("instances file"):
                    self._apply(text, path)
            self._last_error = ""
        except ConfigError as error:
            self._keep(error)

    def _keep(self, error: ConfigError) -> None:
        if str(error) != self._last_error:
            logger.error("the instances are not changed: %s", error)
        self._last_error = str(error)

    def _apply(self, text: str, path: Path) -> None:
        """Apply what has changed in the file since it was last applied; what operators did about other instances stays.
        Raises `ConfigError`."""
        wanted = _parse(text, path)
        config, state = self._config, self._state
        has_decode = config.decode_url or config.registration or any(role == "decode" for role, _ in wanted.values())
        if not has_decode:
            raise ConfigError(f"{path} names no decode instance; a router needs at least one ('decode URL')")
        if not wanted:
            raise ConfigError(f"{path} names no instance; if that is intended, use `kvferry fleet drain` instead")
        before = self._wanted()
        state.set_fact("instances file", text)
        here = {(one.url, one.role) for one in state.members() if not one.draining}
        for one in state.members():
            was, is_now = before.get(one.url), wanted.get(one.url)
            if was is not None and is_now != was and is_now != (one.role, one.bootstrap_port):
                state.drain_member(one.id, remove_when_drained=True)
        for url, (role, port) in wanted.items():
            if before.get(url) != (role, port) and (url, role) not in here:
                state.add_member(role, url, port)


def _read(path: Path) -> str:
    """Raises `ConfigError`."""
    try:
        return _text(path, read_whole(path))
    except ConfigError as error:
        raise ConfigError(f"--instances-file {error}") from error


def _text(path: Path, content: bytes) -> str:
    """Raises `ConfigError`."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _is_some(value: bytes) -> bool:
    """Whether a metric's value is above 0. A value that is not a number counts as above 0."""
    try:
        return float(value) != 0
    except ValueError:
        return True


def _parse(text: str, path: Path) -> Wanted:
    """Parse `prefill URL [BOOTSTRAP-PORT]` or `decode URL` on each line; # begins a comment. Raises `ConfigError`."""
    wanted: Wanted = {}
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = _LINE.fullmatch(said)
        if match is None:
            raise ConfigError(f"{path}, line {number}: {said[:80]!r} is not 'prefill URL' or 'decode URL'")
        role: LegRole = "prefill" if match[1] == "prefill" else "decode"
        url = normalise_url(match[2])
        if url in wanted:
            raise ConfigError(f"{path}, line {number}: {url} is listed twice")
        wanted[url] = role, int(match[3] or BOOTSTRAP_PORT)
    return wanted
