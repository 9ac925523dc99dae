"""Which instances there are: they are added, drained, removed, and change their role, while requests are served.

A draining instance gets no new request. It is drained when no request runs there and nobody may fetch from it any more,
by the router's own count and by the instance's. Owns the draining instances, and the file that may name all of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from kvferry.core.errors import ConfigError, TransferError
from kvferry.http.errors import Unreachable
from kvferry.router.config import RouterConfig
from kvferry.router.errors import InstanceConflict, UnknownInstance
from kvferry.router.instance import BOOTSTRAP_PORT, Instance, InstanceFacts, LegRole, normalise_url
from kvferry.router.pools import Pools
from kvferry.router.upstream import Upstream

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_BUSY = re.compile(
    rb"^(?:kvferry:num_hand_offs_held|vllm:num_requests_running|vllm:num_requests_waiting)(?:\{[^\n]*\})? (\S+)$", re.M
)
"""What runs at an instance, and what it keeps for others, in the metrics of kvferry and of vLLM."""

_LINE = re.compile(r"(prefill|decode)\s+(\S+)(?:\s+(\d{1,5}))?")

Wanted = dict[tuple[LegRole, str], int]
"""Role and URL, with the bootstrap port."""


class Membership:
    """Changes `Pools`."""

    def __init__(self, config: RouterConfig, pools: Pools, upstream: Upstream) -> None:
        """Raises `ConfigError` when there is a file of instances that cannot be used."""
        self._config, self._pools, self._upstream = config, pools, upstream
        self._from_file: set[Instance] = set()
        self._last_text = ""
        if config.instances_file is not None:
            self._apply(self._read(config.instances_file))

    # What operators ask.

    def add(self, role: LegRole, url: str, bootstrap_port: int = BOOTSTRAP_PORT) -> Instance:
        """One more. Raises `ConfigError` on an address that is none, and `InstanceConflict` when it is there."""
        url = normalise_url(url)
        known = self._pools.find(url)
        if known is not None:
            raise InstanceConflict(f"{url} is here as {known.name}, {'draining' if known.draining else known.role}")
        instance = self._pools.pool(role).add(url, bootstrap_port)
        logger.warning("%s (%s) was added", instance, instance.url)
        return instance

    def drain(self, named: str) -> Instance:
        """Give an instance, known by name or URL, no new requests. Raises `UnknownInstance`."""
        instance = self.find(named)
        if not instance.draining:
            self._pools.retire(instance)
            logger.warning("%s (%s) is drained", instance, instance.url)
        return instance

    def remove(self, named: str, *, force: bool = False) -> Instance:
        """Forget a drained instance; with `force`, one that still works. Raises `UnknownInstance` and
        `InstanceConflict`."""
        instance = self.find(named)
        if not force and not instance.drained:
            raise InstanceConflict(f"{instance} is not drained; drain it first and wait, or remove it by force")
        self._pools.retire(instance)
        self._forget(instance)
        return instance

    def change_role(self, named: str, role: LegRole) -> Instance:
        """The instance under its new role: it takes those requests from now on, and ends the others. Raises
        `UnknownInstance` and `InstanceConflict`."""
        before = self.find(named)
        if before.role == role:
            return before
        if before.draining:
            raise InstanceConflict(f"{before} is being drained; add it with its new role when that is done")
        facts = before.facts
        if isinstance(facts, InstanceFacts) and facts.role not in ("both", role):
            raise InstanceConflict(f"{before} was started as a {facts.role} instance, which cannot {role}")
        self._pools.retire(before)
        after = self._pools.pool(role).add(before.url, before.bootstrap_port)
        after.facts = facts
        self._from_file = {after if one is before else one for one in self._from_file}
        before.leaves_by_itself = True
        logger.warning("%s (%s) is now %s", before, before.url, after)
        return after

    def find(self, named: str) -> Instance:
        """By name or URL. Raises `UnknownInstance`."""
        for instance in self._pools:
            if named in (instance.name, instance.url) or named.rstrip("/") == instance.url:
                return instance
        raise UnknownInstance(f"no instance is called {named[:200]!r}; see GET /kvferry/instances")

    # What happens by itself.

    async def watch(self) -> None:
        """Follow the file, and see who is drained; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._follow_file()
                for instance in [one for one in self._pools if one.draining]:
                    await self._look_at(instance)
            except Exception:
                # The edge of this room: the router serves on with the instances that it has.
                logger.exception("the instances could not be looked at")

    async def _look_at(self, instance: Instance) -> None:
        drained = not (instance.in_flight or instance.num_tickets) and await self._is_idle(instance)
        if drained and not instance.drained:
            logger.warning("%s (%s) is drained: nothing runs there, and nothing is kept", instance, instance.url)
        instance.drained = drained
        if drained and instance.leaves_by_itself:
            self._forget(instance)

    async def _is_idle(self, instance: Instance) -> bool:
        """By its own word, which knows of other routers too; one that is gone does nothing any more."""
        if self._pools.find(instance.url) is not instance:
            return True  # it goes on under another role
        try:
            status, text = await self._upstream.ask(instance, "GET", "/metrics", self._config.health_timeout_s)
        except Unreachable:
            return True
        except TransferError:
            return False
        return status != 200 or not any(float(value) for value in _BUSY.findall(text))

    def _forget(self, instance: Instance) -> None:
        self._pools.forget(instance)
        self._from_file.discard(instance)
        if self._pools.find(instance.url) is None:
            self._upstream.forget(instance)
        logger.warning("%s (%s) was removed", instance, instance.url)

    # The file.

    def _follow_file(self) -> None:
        path = self._config.instances_file
        if path is None:
            return
        try:
            self._apply(self._read(path))
        except ConfigError as error:
            logger.error("the instances stay as they are: %s", error)

    def _read(self, path: Path) -> Wanted | None:
        """What the file says, None when that has not changed. Raises `ConfigError`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--instances-file {path}: {getattr(error, 'strerror', None) or error}") from error
        if text == self._last_text:
            return None
        self._last_text = text
        return _parse(text, path)

    def _apply(self, wanted: Wanted | None) -> None:
        if wanted is None:
            return
        have = {(one.role, one.url): one for one in self._from_file if not one.draining}
        for key in have.keys() - wanted.keys():
            have[key].leaves_by_itself = True
            self._pools.retire(have[key])
        for (role, url), port in wanted.items():
            known = self._pools.find(url)
            if known is not None and known.role == role and not known.draining:
                self._from_file.add(known)
            else:
                self._from_file.add(self._pools.pool(role).add(url, port))


def _parse(text: str, path: Path) -> Wanted:
    """`prefill URL [BOOTSTRAP-PORT]` or `decode URL` on each line; # begins a comment. Raises `ConfigError`."""
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
        if any(url == other for _, other in wanted):
            raise ConfigError(f"{path}, line {number}: {url} is there twice")
        wanted[role, url] = int(match[3] or BOOTSTRAP_PORT)
    return wanted
