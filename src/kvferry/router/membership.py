"""Which instances there are: they are added, drained, removed and given another role while requests are served.

A draining instance gets no new requests. It is drained when no request runs there and nobody may fetch from it any
more, by the router's own count and by the instance's metrics. Owns the draining instances, and the file that may list
all instances.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvferry.core.errors import ConfigError, TransferError
from kvferry.core.instance_facts import InstanceFacts
from kvferry.http.errors import Unreachable
from kvferry.router.config import RouterConfig
from kvferry.router.errors import InstanceConflict, UnknownInstance
from kvferry.router.instance import BOOTSTRAP_PORT, Instance, LegRole, normalise_url
from kvferry.router.legs import Legs
from kvferry.router.pools import Pools

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_BUSY = re.compile(
    rb"^(?:kvferry:num_hand_offs_held|vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)"
    rb"(?:\{[^\n]*\})? +(\S+)",
    re.M,
)
"""What runs at an instance, and what it keeps for others, in the metrics of kvferry, vLLM and SGLang."""

_LINE = re.compile(r"(prefill|decode)\s+(\S+)(?:\s+(\d{1,5}))?")

Wanted = dict[str, tuple[LegRole, int]]
"""By URL, the role and the bootstrap port."""


class Membership:
    """Changes `Pools`."""

    def __init__(self, config: RouterConfig, pools: Pools, legs: Legs, file_text: str | None = None) -> None:
        """`file_text`: what a predecessor, whose instances are taken over, last read in the instances file. Raises
        `ConfigError` if there is such a file and it cannot be used."""
        self._config, self._pools, self._legs = config, pools, legs
        self._wanted: Wanted = {}
        self._last_text = self._applied_text = ""
        self._last_error = ""
        self.file_text = ""
        """What the file said when it was last followed."""
        self.all_know: Callable[[Instance], bool] = lambda instance: True
        """Whether all processes of this router know that an instance is drained, and have said what they do there."""
        self.stored: Callable[[], Awaitable[None]] = _nothing
        """Waits until what was done outlives this process. Raises `Unavailable` when nobody says so."""
        if config.instances_file is not None and file_text is not None:
            self._wanted = _parse(file_text, config.instances_file)
            self.file_text = self._last_text = self._applied_text = file_text
        elif config.instances_file is not None:
            self._last_text = _read(config.instances_file)
            self._apply(self._last_text, config.instances_file)

    # What operators ask.

    def add(self, role: LegRole, url: str, bootstrap_port: int = BOOTSTRAP_PORT) -> Instance:
        """Add an instance, or take one back that is drained: what runs there is finished under its old name. Raises
        `ConfigError` if the address is invalid, and `InstanceConflict` if the instance is already here."""
        url = normalise_url(url)
        known = self._pools.find(url)
        if known is not None and not known.draining:
            raise InstanceConflict(f"{url} is here as {known.name}, {known.role}")
        instance = self._pools.pool(role).add(url, bootstrap_port)
        self.supersede(url)
        logger.warning("%s (%s) was added", instance, instance.url)
        return instance

    def drain(self, named: str) -> Instance:
        """Send an instance, given by name or URL, no new requests. Raises `UnknownInstance`."""
        instance = self.find(named)
        if not instance.draining:
            self._pools.retire(instance)
            logger.warning("%s (%s) is drained", instance, instance.url)
            if not self._pools.decode.any_alive:
                logger.warning("no decode instance is left: requests are answered with 503 until one is added")
        return instance

    def supersede(self, url: str) -> None:
        """Instances at this URL that are draining are forgotten as soon as they are drained: there is a new one."""
        for one in self._pools.leaving:
            if one.url == url:
                one.leaves_by_itself = True

    def remove(self, named: str, *, force: bool = False) -> Instance:
        """Remove a drained instance; with `force`, one that still works. Raises `UnknownInstance` and
        `InstanceConflict`."""
        instance = self.find(named)
        if not force and not instance.drained:
            raise InstanceConflict(
                f"{instance} is not drained; drain it first and wait, or remove it by force (--force)"
            )
        self._pools.retire(instance)
        self.forget(instance)
        return instance

    def change_role(self, named: str, role: LegRole) -> Instance:
        """The instance with its new role. It gets requests of that role from now on, and finishes the others. Raises
        `UnknownInstance` and `InstanceConflict`."""
        before = self.find(named)
        if before.role == role:
            return before
        if before.draining:
            raise InstanceConflict(f"{before} is being drained; add it with its new role when that is done")
        facts = before.facts
        if isinstance(facts, InstanceFacts) and facts.role not in ("both", role):
            raise InstanceConflict(f"{before} was started as a {facts.role} instance, which cannot {role}")
        if isinstance(facts, InstanceFacts) and role == "prefill" and facts.connector is None:
            raise InstanceConflict(f"{before} was started without a connector, and cannot hand off")
        after = self._pools.pool(role).add(before.url, before.bootstrap_port)
        after.takes_after(before)
        self._pools.retire(before)
        before.leaves_by_itself = True
        logger.warning("%s (%s) is now %s", before, before.url, after)
        return after

    def find(self, named: str) -> Instance:
        """The instance with this name or URL. Raises `UnknownInstance`."""
        for instance in self._pools:
            if named in (instance.name, instance.url) or named.rstrip("/") == instance.url:
                return instance
        raise UnknownInstance(f"no instance is called {named[:200]!r}; see GET /kvferry/instances")

    def names(self, url: str) -> bool:
        """Whether the file lists this URL."""
        return url in self._wanted

    # What happens by itself.

    async def watch(self) -> None:
        """Follow the file, and notice which instances are drained; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._follow_file()
            except Exception:
                # The edge of this room: the router serves on with the instances that it has.
                logger.exception("the file of instances could not be followed")
            await asyncio.gather(*(self._look_safely(one) for one in self._pools if one.draining))

    async def _look_safely(self, instance: Instance) -> None:
        try:
            await self._look_at(instance)
        except Exception:
            # Likewise: what one instance answers must not keep another from being drained.
            logger.exception("could not find out whether %s is drained", instance)

    async def _look_at(self, instance: Instance) -> None:
        drained = await self._is_idle(instance) and self.all_know(instance) and not instance.is_held
        if instance not in self._pools.leaving:
            return  # it was removed meanwhile
        if drained and not instance.drained:
            logger.warning(
                "%s (%s) is drained: nothing runs there, and it holds no KV for others", instance, instance.url
            )
        instance.is_drained(drained)
        if drained and instance.leaves_by_itself:
            self.forget(instance)

    async def _is_idle(self, instance: Instance) -> bool:
        """By the router's count, and by the metrics of the process, which also show the requests of other routers.

        These metrics cover all roles of one process, so they are not used if the process continues with another role. A
        process that is gone is idle, whether it refuses connections or `Health` has given it up.
        """
        same = [one for one in self._pools if one.url == instance.url]
        if not all(one.draining for one in same):
            return not instance.is_held
        if any(one.is_held for one in same):
            return False
        try:
            status, text = await self._legs.metrics(instance, self._config.health_timeout_s)
        except Unreachable:
            return True
        except TransferError:
            return bool(instance.trouble)
        return status == 404 or (status == 200 and not any(map(_is_some, _BUSY.findall(text))))

    def forget(self, instance: Instance) -> None:
        """An instance that was retired is gone."""
        self._pools.forget(instance)
        if not any(one.origin == instance.origin for one in self._pools):
            self._legs.close_connections(instance)
        logger.warning("%s (%s) was removed", instance, instance.url)

    # The file.

    def _follow_file(self) -> None:
        path = self._config.instances_file
        if path is None:
            return
        try:
            text = _read(path)
        except ConfigError as error:
            self._keep(error)
            return
        self._last_error = ""
        is_settled, self._last_text = text == self._last_text, text
        if is_settled and text != self._applied_text:  # else someone may be in the middle of writing it
            try:
                self._apply(text, path)
            except ConfigError as error:
                self._keep(error)

    def _keep(self, error: ConfigError) -> None:
        if str(error) != self._last_error:
            logger.error("the instances are not changed: %s", error)
        self._last_error = str(error)

    def _apply(self, text: str, path: Path) -> None:
        """Apply what has changed in the file since it was last applied; what operators did about other instances stays.
        Raises `ConfigError`."""
        self._applied_text = text
        wanted = _parse(text, path)
        config = self._config
        has_decode = config.decode_url or config.registration or any(role == "decode" for role, _ in wanted.values())
        if not has_decode:
            raise ConfigError(f"{path} names no decode instance; a router needs at least one ('decode URL')")
        if not wanted:
            raise ConfigError(f"{path} names no instance; if that is intended, use `kvferry fleet drain` instead")
        before, self._wanted, self.file_text = self._wanted, wanted, text
        for instance in [one for one in self._pools if one.url in before]:
            self._keep_or_retire(instance, before[instance.url], wanted.get(instance.url))
        for url, (role, port) in wanted.items():
            known = self._pools.find(url)
            is_here = known is not None and not known.draining and known.role == role
            if before.get(url) != (role, port) and not is_here:
                self._pools.pool(role).add(url, port)

    def _keep_or_retire(
        self, instance: Instance, before: tuple[LegRole, int], wanted: tuple[LegRole, int] | None
    ) -> None:
        if wanted != before and wanted != (instance.role, instance.bootstrap_port):
            instance.leaves_by_itself = True
            self._pools.retire(instance)


async def _nothing() -> None:
    """There is no other process."""


def _read(path: Path) -> str:
    """Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--instances-file {path}: {getattr(error, 'strerror', None) or error}") from error


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
