"""The plan that the scheduler side of `MultiConnector` sends to its worker sides."""

from __future__ import annotations

from typing import Any

import msgspec


class MultiPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`plans`: each connector's plan, in order; None if it has none. `loads`: index of the connector that loads, by
    request id, for loads that begin. `holds`: indices of the connectors that keep the blocks of each of these ended
    requests."""

    plans: list[Any]
    loads: dict[str, int] = {}
    holds: dict[str, list[int]] = {}
