"""The load of instances, and the candidates among which a policy chooses.

The numbers of all instances are rows of a table, so that a policy scores hundreds of them with a few vector operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
"""A number for each of several instances."""


_PREFILL_TOKENS, _NUM_PREFILLS, _NUM_DECODES, _RECENT, _LAST_TURN, _CONSTANT = range(6)
_NUM_COLUMNS = 6


class LoadTable:
    """A row of numbers for each instance. The column `_RECENT` is scaled: a token that was stored at `_since` counts 1,
    and later tokens count more, so that time changes all rows by a common factor."""

    max_half_lives = 64
    """Number of half-lives after which `LoadTable` rescales its column, long before the numbers become too large."""
    half_life_s = 1800.0
    """Seconds after which the tokens that a cache has stored count half."""

    def __init__(self) -> None:
        self._since = 0.0
        self._num_rows, self._free = 0, list[int]()
        self.numbers = np.zeros((8, _NUM_COLUMNS))
        self.numbers[:, _CONSTANT] = 1.0
        self.cells: Any = self.numbers.reshape(-1).data
        """The same numbers as a flat buffer, in which single numbers are read and written faster."""

    def take_row(self) -> int:
        """Allocate a row of zeros."""
        if self._free:
            row = self._free.pop()
            self.numbers[row, :_CONSTANT] = 0.0
            return row
        self._num_rows += 1
        if self._num_rows > len(self.numbers):
            self.numbers = np.concatenate([self.numbers, np.zeros_like(self.numbers)])
            self.numbers[:, _CONSTANT] = 1.0
            self.cells = self.numbers.reshape(-1).data
        return self._num_rows - 1

    def free_row(self, row: int) -> None:
        """Free the row of an instance that was removed."""
        self._free.append(row)

    def scale(self, now: float) -> float:
        """Weight of a token that is stored at `now`."""
        half_lives = (now - self._since) / self.half_life_s
        if half_lives > self.max_half_lives:
            self.numbers[:, _RECENT] *= math.exp2(-min(half_lives, 1000.0))
            self._since, half_lives = now, 0.0
        return math.exp2(half_lives)


def _cell(column: int, doc: str) -> Any:
    def get(load: InstanceLoad) -> float:
        number: float = load.table.cells[load.offset + column]
        return number

    def put(load: InstanceLoad, value: float) -> None:
        load.table.cells[load.offset + column] = value

    return property(get, put, doc=doc)


class _Row:
    """A row of a table, which is freed with the last load that uses it."""

    __slots__ = ("number", "table")

    def __init__(self, table: LoadTable) -> None:
        self.table, self.number = table, table.take_row()

    def __del__(self) -> None:
        self.table.free_row(self.number)


class InstanceLoad:
    """The load of an instance: a row of a table, and two counts that policies do not read. Written by the `Work` of
    each leg, by hand-offs (`num_tickets`), or by a simulator.

    `predecessor`: the load of the same instance in its former role. Both share a row, so that a policy sees the work of
    both; legs and tickets are counted separately."""

    __slots__ = ("_row", "num_legs", "num_tickets", "offset", "row", "table")

    def __init__(self, table: LoadTable | None = None, predecessor: InstanceLoad | None = None) -> None:
        self._row: _Row = _Row(table or LoadTable()) if predecessor is None else predecessor._row
        self.table, self.row = self._row.table, self._row.number
        self.offset = self.row * _NUM_COLUMNS
        """Index of its first cell."""
        self.num_legs = 0
        """Number of open legs."""
        self.num_tickets = 0
        """Number of hand-offs for which it may keep blocks."""

    prefill_tokens = _cell(_PREFILL_TOKENS, "Uncached tokens of its running and queued prompts.")
    num_prefills = _cell(_NUM_PREFILLS, "Running and queued prompts.")
    num_decodes = _cell(_NUM_DECODES, "Running and queued answers.")
    last_turn = _cell(_LAST_TURN, "The turn in which it was last chosen; 0: never.")

    def add_recent(self, num_tokens: float, now: float) -> None:
        """Record that the instance's cache stores this many tokens, at `now` on the policy's clock."""
        scale = self.table.scale(now)  # first: it may scale the column
        self.table.cells[self.offset + _RECENT] += num_tokens * scale

    def level(self, peers: Iterable[InstanceLoad]) -> None:
        """Raise its recent tokens to the lowest value of the peers that it joins. Otherwise all requests would go to it
        until it has stored as many tokens as they have, however long its queue is."""
        cells = self.table.cells
        min_recent = min((cells[peer.offset + _RECENT] for peer in peers), default=0.0)
        cells[self.offset + _RECENT] = max(cells[self.offset + _RECENT], min_recent)

    def __repr__(self) -> str:
        return f"InstanceLoad({self.table.numbers[self.row]})"


class Work:
    """The share of a leg in the load of its instance, from when it is sent until it ends.

    `uncached`: number of tokens of the prompt that the instance probably has not cached, and will compute or get;
    `computes`: True if it will compute them; `decodes`: True if it will answer; `ahead`: number of tokens that were
    queued before them. `now`: time of the policy's clock.
    """

    __slots__ = ("_computing", "_has_ended", "_load", "ahead", "computes", "decodes", "num_concurrent", "uncached")

    def __init__(self, load: InstanceLoad, uncached: int, now: float, *, computes: bool, decodes: bool) -> None:
        self._load, self.uncached, self.computes, self.decodes = load, uncached, computes, decodes
        self.num_concurrent = 0.0
        """Number of running answers on the instance, including this one: when it began; after the end, the mean of both
        times."""
        self._computing, self._has_ended = computes, False
        cells, offset = load.table.cells, load.offset
        load.num_legs += 1
        self.ahead: float = cells[offset + _PREFILL_TOKENS]
        if decodes:
            cells[offset + _NUM_DECODES] += 1.0
        if computes:
            cells[offset + _NUM_PREFILLS] += 1.0
            cells[offset + _PREFILL_TOKENS] += uncached
        scale = load.table.scale(now)  # first: it may scale the column
        cells[offset + _RECENT] += uncached * scale

    def on_answered(self) -> None:
        """Record that the answer has begun or was given up, so that the prompt is no longer to be computed."""
        cells, offset = self._load.table.cells, self._load.offset
        if self._computing:
            self._computing = False
            cells[offset + _NUM_PREFILLS] -= 1.0
            cells[offset + _PREFILL_TOKENS] -= self.uncached
        self.num_concurrent = cells[offset + _NUM_DECODES]

    def end(self) -> None:
        """End the work. May be called several times."""
        if self._has_ended:
            return
        self._has_ended, num_at_begin, load = True, self.num_concurrent, self._load
        if self._computing:
            self.on_answered()
        cells, offset = load.table.cells, load.offset
        self.num_concurrent = (num_at_begin + cells[offset + _NUM_DECODES]) / 2
        load.num_legs -= 1
        if self.decodes:
            cells[offset + _NUM_DECODES] -= 1.0


class Target(Protocol):
    """An instance as a policy sees it; hashable by identity."""

    @property
    def name(self) -> str:
        """Unique within the router."""

    @property
    def load(self) -> InstanceLoad:
        """Its load."""


T = TypeVar("T", bound=Target)


class Candidates(list[T]):
    """Instances of a router to choose among, and their loads as vectors in the same order. Immutable.

    `memo` caches results that depend on the set of instances only.
    """

    __slots__ = ("_rows", "_table", "memo")

    def __init__(self, instances: Iterable[T]) -> None:
        super().__init__(instances)
        self.memo: dict[Any, Any] = {}
        loads = [instance.load for instance in self]
        self._table = loads[0].table if loads else LoadTable()
        if any(load.table is not self._table for load in loads):
            raise ValueError("the loads of the instances are in several tables")
        rows = [load.row for load in loads]
        is_range = rows and rows == list(range(rows[0], rows[0] + len(rows)))
        self._rows: Any = slice(rows[0], rows[-1] + 1) if is_range else np.array(rows, np.intp)

    def weighed(
        self,
        *,
        prefill_tokens: float = 0.0,
        num_prefills: float = 0.0,
        num_decodes: float = 0.0,
        recent_tokens: float = 0.0,
        now: float = 0.0,
        constant: float = 0.0,
    ) -> Vector:
        """The load of each instance as a number: the weighted sum of its parts, plus a constant. `recent_tokens`:
        weight of the tokens that its cache has stored until `now`; older tokens count less."""
        recent = recent_tokens and recent_tokens / self._table.scale(now)
        weights = np.array((prefill_tokens, num_prefills, num_decodes, recent, 0.0, constant))
        load: Vector = self._table.numbers[self._rows].dot(weights)
        return load

    @property
    def prefill_tokens(self) -> Vector:
        """Queued tokens of each instance. Do not change this column, or the others."""
        return self._column(_PREFILL_TOKENS)

    @property
    def num_decodes(self) -> Vector:
        """Running and queued answers of each instance."""
        return self._column(_NUM_DECODES)

    @property
    def last_turn(self) -> Vector:
        """The turn in which each instance was last chosen."""
        return self._column(_LAST_TURN)

    def _column(self, column: int) -> Vector:
        column_vector: Vector = self._table.numbers[self._rows, column]
        return column_vector


def candidates(instances: Iterable[T]) -> Candidates[T]:
    """These instances, with their loads as vectors."""
    return instances if isinstance(instances, Candidates) else Candidates(instances)
