"""The plan that the scheduler side of `MultiConnector` sends to its worker sides."""

from __future__ import annotations

from typing import Any

import msgspec


class MultiPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`plans`: the plan of each connector, in order; None: it has none. `loads`: for each load that begins, by request
    id, the index of the connector that loads. `holds`: for each ended request, the indices of the connectors that keep
    its blocks."""

    plans: list[Any]
    loads: dict[str, int] = {}
    holds: dict[str, list[int]] = {}
