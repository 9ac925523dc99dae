"""What the scheduler side of several connectors asks of their worker sides."""

from __future__ import annotations

from typing import Any

import msgspec


class MultiPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`plans`: each connector's plan, in order; None where it has none. `loads`: by request id, which connector loads,
    for loads that begin. `holds`: which connectors keep the blocks of each of these requests, which have ended."""

    plans: list[Any]
    loads: dict[str, int] = {}
    holds: dict[str, list[int]] = {}
