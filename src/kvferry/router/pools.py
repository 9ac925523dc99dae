"""The instances of each role. Owns the lists; does not know how to reach an instance."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.instance import Instance, LegRole


class Pool:
    """All instances of one role."""

    def __init__(self, role: LegRole, urls: Iterable[str], bootstrap_ports: Sequence[int] = ()) -> None:
        self.role = role
        self.instances = [
            Instance(role, url, *bootstrap_ports[index : index + 1], name=f"{role}-{index}")
            for index, url in enumerate(urls)
        ]
        self._turn, self._last_turn = 0, dict[Instance, int]()
        seen: set[str] = set()
        for instance in self.instances:
            if instance.url in seen:
                raise ConfigError(f"--{role}-url {instance.url} is given twice")
            seen.add(instance.url)

    def alive(self, exclude: Collection[Instance] = ()) -> list[Instance]:
        """Those that are usable and not excluded. One whose health is late is there only when no other is."""
        usable = [one for one in self.instances if one.usable and one not in exclude]
        return [one for one in usable if one.trusted] or usable

    def pick(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """Whose turn it is, for what has no prompt to choose by. When none of the rest seems usable, one of them all
        the same: what seems dead may be back, and an attempt is better than a refusal. None when all are excluded.

        The turn is that of the one that was picked longest ago, so instances that come and go do not unsettle the rest.
        """
        candidates = self.alive(exclude) or [one for one in self.instances if one not in exclude]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda instance: self._last_turn.get(instance, 0))
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen

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
            prefill=Pool("prefill", config.prefill_url, config.bootstrap_port),
            decode=Pool("decode", config.decode_url),
        )

    def __iter__(self) -> Iterator[Instance]:
        yield from self.prefill.instances
        yield from self.decode.instances
