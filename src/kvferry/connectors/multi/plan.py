"""What the scheduler side of several connectors asks of their worker sides."""

from __future__ import annotations

from typing import Any

import msgspec


class MultiPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`plans`: of each connector, in order, None where it has none. `loads`: which one loads for these requests, from
    now on. `holds`: which ones keep the blocks of these requests, that have ended."""

    plans: list[Any]
    loads: dict[str, int] = {}
    holds: dict[str, list[int]] = {}
