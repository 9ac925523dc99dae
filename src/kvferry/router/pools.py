"""The instances of each role. Owns the lists; does not know how to reach an instance."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.instance import Instance, LegRole
from kvferry.router.policies.base import Picker
from kvferry.router.policies.round_robin import RoundRobin


class Pool:
    """All instances of one role, and the picker that chooses among them."""

    def __init__(self, role: LegRole, urls: Iterable[str], picker: Picker, bootstrap_ports: Sequence[int] = ()) -> None:
        self.role = role
        self.instances = [
            Instance(role, url, *bootstrap_ports[index : index + 1], name=f"{role}-{index}")
            for index, url in enumerate(urls)
        ]
        self._picker = picker
        seen: set[str] = set()
        for instance in self.instances:
            if instance.url in seen:
                raise ConfigError(f"--{role}-url {instance.url} is given twice")
            seen.add(instance.url)

    def pick_alive(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """An instance that is usable and not excluded, or None. One whose health is late is taken only when no other
        is there."""
        usable = [one for one in self.instances if one.usable and one not in exclude]
        candidates = [one for one in usable if one.trusted] or usable
        return self._picker.pick(candidates) if candidates else None

    def pick(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """As `pick_alive`, but when none of the rest seems usable, one of them all the same: what seems dead may
        be back, and an attempt is better than a refusal. None only when all are excluded."""
        usable = self.pick_alive(exclude)
        if usable is not None:
            return usable
        candidates = [one for one in self.instances if one not in exclude]
        return self._picker.pick(candidates) if candidates else None

    @property
    def num_alive(self) -> int:
        """How many seem able to serve."""
        return sum(instance.usable for instance in self.instances)


@dataclass(frozen=True)
class Pools:
    """Both pools."""

    prefill: Pool
    decode: Pool

    @classmethod
    def from_config(cls, config: RouterConfig) -> Pools:
        """Raises `ConfigError` when there is no decode instance or an address is wrong."""
        if not config.decode_url:
            raise ConfigError(
                "the router needs at least one decode instance; name it with --decode-url http://host:port"
            )
        return cls(
            prefill=Pool("prefill", config.prefill_url, RoundRobin(), config.bootstrap_port),
            decode=Pool("decode", config.decode_url, RoundRobin()),
        )

    def __iter__(self) -> Iterator[Instance]:
        yield from self.prefill.instances
        yield from self.decode.instances
