"""Latency targets in the form of `--slo`: `ttft=2s,itl=50ms`."""

from __future__ import annotations

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import unknown_key
from kvferry.fleet.spec.fleet_spec import seconds


class Targets(msgspec.Struct, frozen=True):
    """Max seconds; None: no target. `itl`: the mean time between two tokens of one answer; `e2e`: to the last token."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def met_by(self, ttft_s: float, e2e_s: float, num_tokens: int) -> bool:
        """True if an answer with these times meets all of them."""
        itl_s = (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        pairs = ((self.ttft, ttft_s), (self.itl, itl_s), (self.e2e, e2e_s))
        return all(target is None or latency_s <= target for target, latency_s in pairs)

    def __str__(self) -> str:
        targets = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ",".join(f"{name}={_short(value)}" for name, value in targets if value is not None)


def _short(value: float) -> str:
    return f"{value:g}s" if value >= 1 else f"{value * 1000:g}ms"


def parse_targets(text: str) -> Targets:
    """Parse targets. Raises `ConfigError` that names the problem, and the nearest name."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, has_value, value = part.strip().partition("=")
        if name not in Targets.__struct_fields__:
            raise ConfigError(unknown_key(f"--slo: {name[:40]!r}", name, Targets.__struct_fields__, "target"))
        if name in targets:
            raise ConfigError(f"--slo: {name} is set twice")
        if not has_value:
            raise ConfigError(f"--slo: {name} has no value; write it as {name}=50ms")
        try:
            targets[name] = seconds(value.strip())
        except ConfigError as error:
            raise ConfigError(f"--slo: {name}: {error}") from error
        if not targets[name]:
            raise ConfigError(f"--slo: {name} must be more than 0")
    return Targets(**targets)
