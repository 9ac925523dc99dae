"""The instances of each role. Owns the lists; does not know how to reach an instance."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import SCHEME
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import BOOTSTRAP_PORT, Instance, LegRole, Revision, normalise_url
from kvferry.router.instances.load import Candidates, LoadTable, candidates
from kvferry.router.instances.shared_plan import SharedFleetPlan

NO_TICKETS_S, _WITHOUT_KV_S = 60.0, 2.0
"""How long requests are not split over a prefill instance that answers without tickets, or whose store takes no KV and
which cannot be asked whether it does again."""


class RolePool:
    """All instances of one role."""

    def __init__(
        self,
        role: LegRole,
        clock: Clock | None = None,
        revision: Revision | None = None,
        loads: LoadTable | None = None,
    ) -> None:
        self.role, self._clock = role, clock or SYSTEM_CLOCK
        self.instances: list[Instance] = []
        self.revision, self._loads = revision or Revision(), loads or LoadTable()
        self._alive = Candidates[Instance](())
        self._alive_states, self._alive_until = -1, 0.0
        """The states of the instances for which `_alive` was found, and until when none of them stops pausing."""
        self._turn, self._last_turn = 0, dict[Instance, int]()
        self.without_tickets: dict[Instance, tuple[float, int]] = {}
        """Prefill instances over which requests are not split, and until when, on the router's monotonic clock."""

    def add(
        self,
        url: str,
        bootstrap_port: int = BOOTSTRAP_PORT,
        *,
        name: str = "",
        member: int = 0,
        unit: str = "",
        before: Instance | None = None,
    ) -> Instance:
        """Add an instance. `before`: the one at this address, which is leaving its role. Raises `ConfigError`."""
        instance = Instance(
            self.role,
            url,
            bootstrap_port,
            name=name or f"{self.role}-{len(self.instances)}",
            revision=self.revision,
            member=member,
            unit=unit,
            loads=self._loads,
            before=before,
        )
        self.instances.append(instance)
        self.revision.grow()
        return instance

    def leave_out(self, instance: Instance, seconds: float) -> None:
        """Split no requests over a prefill instance for `seconds`: D would compute the prompts again."""
        self.without_tickets[instance] = self._clock.monotonic() + seconds, instance.process

    def takes_no_kv(self, instance: Instance) -> None:
        """A prefill instance's stores take no KV: split no requests over it until `Health` hears that they do, or for a
        while."""
        if isinstance(instance.facts, InstanceFacts):
            instance.amend(msgspec.structs.replace(instance.facts, stores_take_kv=False))
        else:
            self.leave_out(instance, _WITHOUT_KV_S)

    def hand_off(self, instances: Sequence[Instance]) -> Candidates[Instance]:
        """`instances` without those that are left out, or whose stores take no KV."""
        group = candidates(instances)
        known: Candidates[Instance] | None = group.memo.get("hand off")
        if known is None:
            takers = Candidates(one for one in group if one.stores_take_kv)
            known = group.memo["hand off"] = group if len(takers) == len(group) else takers
        if self.without_tickets:
            now = self._clock.monotonic()
            self.without_tickets = {
                one: (until, process)
                for one, (until, process) in self.without_tickets.items()
                if until > now and process == one.process
            }
            return Candidates(one for one in known if one not in self.without_tickets)
        return known

    def drop(self, instance: Instance) -> None:
        """Remove an instance from the choice."""
        self.instances.remove(instance)
        self.revision.grow()
        self._last_turn.pop(instance, None)
        self.without_tickets.pop(instance, None)

    def alive(self, exclude: Collection[Instance] = ()) -> Candidates[Instance]:
        """Instances that are usable and not excluded. One that is late with its health, or that asked for a pause
        (`Retry-After`), is included only if there is no other."""
        if not exclude and self._alive_states == self.revision.states and self._alive_until == math.inf:
            return self._alive
        now = self._clock.monotonic()
        if exclude:
            return Candidates(self._find_alive(exclude, now))
        if self._alive_states != self.revision.states or now >= self._alive_until:
            before, self._alive = self._alive, Candidates(self._find_alive((), now))
            self._level(before)
            self._alive_states = self.revision.states
            self._alive_until = min(
                (one.busy_until for one in self.instances if one.busy_until > now), default=math.inf
            )
        return self._alive

    def _level(self, before: Candidates[Instance]) -> None:
        """Instances that were not among those `before` are new, or were not usable for a while."""
        known = set(before)
        stayed = [one.load for one in self._alive if one in known]
        for one in self._alive:
            if one not in known:
                one.load.level(stayed)

    def _find_alive(self, exclude: Collection[Instance], now: float) -> list[Instance]:
        best = [one for one in self.instances if one.trusted and one.busy_until <= now and one not in exclude]
        return best or self._doubtful(exclude, now)

    def _doubtful(self, exclude: Collection[Instance], now: float) -> list[Instance]:
        usable = [one for one in self.instances if one.usable and one not in exclude]
        trusted = [one for one in usable if one.trusted] or usable
        return [one for one in trusted if one.busy_until <= now] or trusted

    def pick(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """The next instance in turn, for requests without a prompt to choose by. If none seems usable, one of them
        nevertheless: it may be back, and an attempt is better than an error. None if all are excluded.

        The one that was picked longest ago comes next, so instances may come and go.
        """
        able = self.alive(exclude) or [one for one in self.instances if one not in exclude]
        if not able:
            return None
        chosen = min(able, key=lambda instance: self._last_turn.get(instance, 0))
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen

    @property
    def num_alive(self) -> int:
        """How many instances seem able to serve."""
        return sum(instance.usable for instance in self.instances)


@dataclass(frozen=True)
class Pools:
    """Both pools, the instances that have been in them and are being drained, and what the fleet's controller says."""

    prefill: RolePool
    decode: RolePool
    leaving: list[Instance] = field(default_factory=list)
    directions: SharedFleetPlan = field(default_factory=SharedFleetPlan)

    @classmethod
    def from_config(cls, config: RouterConfig, clock: Clock | None = None) -> Pools:
        """Pools with the instances that flags name. Raises as `given_instances`."""
        pools = cls.empty(clock)
        for role, url, port in given_instances(config):
            pools.pool(role).add(url, port)
        return pools

    @classmethod
    def empty(cls, clock: Clock | None = None) -> Pools:
        """Pools without instances."""
        revision, loads = Revision(), LoadTable()
        return cls(RolePool("prefill", clock, revision, loads), RolePool("decode", clock, revision, loads))

    def __iter__(self) -> Iterator[Instance]:
        yield from self.prefill.instances
        yield from self.decode.instances
        yield from self.leaving

    @property
    def revision(self) -> int:
        """A number that changes whenever an instance came, went or said something new about itself."""
        return self.prefill.revision.number

    def pool(self, role: LegRole) -> RolePool:
        """The pool of a role."""
        return self.prefill if role == "prefill" else self.decode

    def find(self, url: str) -> Instance | None:
        """The instance at this URL; one that is not draining comes first."""
        return next((one for one in self if one.url == url), None)

    def member(self, member: int) -> Instance:
        """The instance with this number, which is here."""
        return next(one for one in self if one.member == member)

    def retire(self, instance: Instance) -> None:
        """Send it no new requests. May be called repeatedly."""
        if not instance.draining:
            instance.drain()
            self.pool(instance.role).drop(instance)
            self.leaving.append(instance)

    def forget(self, instance: Instance) -> None:
        """Remove an instance that has been drained."""
        self.leaving.remove(instance)
        self.prefill.revision.grow()


def given_instances(config: RouterConfig) -> list[tuple[LegRole, str, int]]:
    """Role, URL and bootstrap port of each instance that flags name. Raises `ConfigError` when there is no decode
    instance or an address is wrong."""
    if not config.decode_url and config.instances_file is None and not (config.registration or config.declared):
        raise ConfigError(
            "the router needs at least one decode instance; name it with --decode-url http://host:port, or let"
            " instances register themselves with --registration"
        )
    found: dict[str, tuple[LegRole, str, int]] = {}
    ports = [*config.bootstrap_port, *[BOOTSTRAP_PORT] * len(config.prefill_url)]
    for one in config.prefill_url:
        if one.startswith(SCHEME):
            continue
        if (url := normalise_url(one)) in found:
            raise ConfigError(f"--prefill-url {url} is given twice")
        found[url] = "prefill", url, ports[len(found)]
    for one in config.decode_url:
        if one.startswith(SCHEME):
            continue
        url = normalise_url(one)
        if found.get(url, ("",))[0] == "prefill":
            raise ConfigError(f"--prefill-url {url} is a --decode-url too; an instance has one role")
        if url in found:
            raise ConfigError(f"--decode-url {url} is given twice")
        found[url] = "decode", url, BOOTSTRAP_PORT
    return [*found.values()]
