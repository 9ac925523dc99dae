"""The work that instances have been given, and a choice of instances as a policy sees it.

The numbers of all instances are rows of a table, so that a policy scores hundreds of them with a few operations on
vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
"""One number for each of some instances."""

_HALF_LIFE_S = 1800.0
"""Seconds after which what an instance's cache has taken in counts half."""

_MAX_HALF_LIVES = 64
"""Number of half-lives after which `LoadTable` scales its column anew, long before a number is too large."""

_PREFILL_TOKENS, _NUM_PREFILLS, _NUM_DECODES, _RECENT, _LAST_TURN, _ONE = range(6)
_NUM_COLUMNS = 6


class LoadTable:
    """A row of numbers for each instance. Those in the column `_RECENT` are scaled: a token that was taken in at
    `_since` counts 1, and later ones more, so that time changes all rows by a common factor."""

    def __init__(self) -> None:
        self._since = 0.0
        self._num_rows, self._free = 0, list[int]()
        self.numbers = np.zeros((8, _NUM_COLUMNS))
        self.numbers[:, _ONE] = 1.0
        self.cells: Any = self.numbers.reshape(-1).data
        """The same numbers, row after row: single ones are read and written faster here."""

    def take_row(self) -> int:
        """A row of zeros."""
        if self._free:
            row = self._free.pop()
            self.numbers[row, :_ONE] = 0.0
            return row
        self._num_rows += 1
        if self._num_rows > len(self.numbers):
            self.numbers = np.concatenate([self.numbers, np.zeros_like(self.numbers)])
            self.numbers[:, _ONE] = 1.0
            self.cells = self.numbers.reshape(-1).data
        return self._num_rows - 1

    def free_row(self, row: int) -> None:
        """Free the row of an instance that is gone."""
        self._free.append(row)

    def scale(self, now: float) -> float:
        """What a token counts that is taken in at `now`."""
        half_lives = (now - self._since) / _HALF_LIFE_S
        if half_lives > _MAX_HALF_LIVES:
            self.numbers[:, _RECENT] *= math.exp2(-min(half_lives, 1000.0))
            self._since, half_lives = now, 0.0
        return math.exp2(half_lives)


def _cell(column: int, about: str) -> Any:
    def get(load: InstanceLoad) -> float:
        number: float = load.table.cells[load.at + column]
        return number

    def put(load: InstanceLoad, value: float) -> None:
        load.table.cells[load.at + column] = value

    return property(get, put, doc=about)


class _Row:
    """A row of a table, which is free again when no load has it any more."""

    __slots__ = ("number", "table")

    def __init__(self, table: LoadTable) -> None:
        self.table, self.number = table, table.take_row()

    def __del__(self) -> None:
        self.table.free_row(self.number)


class InstanceLoad:
    """What the router has given one instance to do: a row of a table, and two counts that no policy asks for. Written
    by the `Work` of each leg, by hand-offs (`num_tickets`), or by a simulator.

    `before`: the load of the same instance in the role that it had before. Both have one row, so that whoever chooses
    sees what still runs there; legs and tickets are counted for each."""

    __slots__ = ("_row", "at", "num_legs", "num_tickets", "row", "table")

    def __init__(self, table: LoadTable | None = None, before: InstanceLoad | None = None) -> None:
        self._row: _Row = _Row(table or LoadTable()) if before is None else before._row
        self.table, self.row = self._row.table, self._row.number
        self.at = self.row * _NUM_COLUMNS
        """Where its cells begin."""
        self.num_legs = 0
        """Legs that are under way there."""
        self.num_tickets = 0
        """Hand-offs of the router's requests for which it may keep blocks."""

    prefill_tokens = _cell(_PREFILL_TOKENS, "Of prompts that it computes or that wait there, without what it had.")
    num_prefills = _cell(_NUM_PREFILLS, "Prompts that it computes or that wait there.")
    num_decodes = _cell(_NUM_DECODES, "Answers that it writes or is to write.")
    last_turn = _cell(_LAST_TURN, "The number of the last choice that was this instance; 0: none.")

    def note_taken(self, num_tokens: float, now: float) -> None:
        """Note that the instance's cache takes in this many more tokens, at `now` on the policy's clock."""
        scale = self.table.scale(now)  # first: it may scale the column
        self.table.cells[self.at + _RECENT] += num_tokens * scale

    def level(self, peers: Iterable[InstanceLoad]) -> None:
        """Count the instance's cache as having taken in at least as much as those of all its peers, which it joins or
        rejoins: until it had, all that comes would go to it, whatever waits there."""
        cells = self.table.cells
        least = min((cells[one.at + _RECENT] for one in peers), default=0.0)
        cells[self.at + _RECENT] = max(cells[self.at + _RECENT], least)

    def __repr__(self) -> str:
        return f"InstanceLoad({self.table.numbers[self.row]})"


class Work:
    """What one leg adds to the load of its instance, from when it is sent until it is over. `uncached`: tokens of the
    prompt that the instance probably does not have, and takes in, computed or handed over; `computes`: it will compute
    them; `decodes`: it will answer. `ahead`: tokens that were still to be computed there before. `now` is on the
    policy's clock."""

    __slots__ = ("_computing", "_load", "_over", "ahead", "computes", "decodes", "num_beside", "uncached")

    def __init__(self, load: InstanceLoad, uncached: int, now: float, *, computes: bool, decodes: bool) -> None:
        self._load, self.uncached, self.computes, self.decodes = load, uncached, computes, decodes
        self.num_beside = 0.0
        """Answers that ran on the instance meanwhile, this one included: when it began, in the end the mean with the
        end."""
        self._computing, self._over = computes, False
        cells, at = load.table.cells, load.at
        load.num_legs += 1
        self.ahead: float = cells[at + _PREFILL_TOKENS]
        if decodes:
            cells[at + _NUM_DECODES] += 1.0
        if computes:
            cells[at + _NUM_PREFILLS] += 1.0
            cells[at + _PREFILL_TOKENS] += uncached
        scale = load.table.scale(now)  # first: it may scale the column
        cells[at + _RECENT] += uncached * scale

    def answered(self) -> None:
        """Note that the answer has begun, or is given up: the prompt is not to be computed any more."""
        cells, at = self._load.table.cells, self._load.at
        if self._computing:
            self._computing = False
            cells[at + _NUM_PREFILLS] -= 1.0
            cells[at + _PREFILL_TOKENS] -= self.uncached
        self.num_beside = cells[at + _NUM_DECODES]

    def end(self) -> None:
        """End the work, however it ended. May be called several times."""
        if self._over:
            return
        self._over, before, load = True, self.num_beside, self._load
        if self._computing:
            self.answered()
        cells, at = load.table.cells, load.at
        self.num_beside = (before + cells[at + _NUM_DECODES]) / 2
        load.num_legs -= 1
        if self.decodes:
            cells[at + _NUM_DECODES] -= 1.0


class Target(Protocol):
    """An instance as a policy sees it; hashable by identity."""

    @property
    def name(self) -> str:
        """Unique within the router."""

    @property
    def load(self) -> InstanceLoad:
        """The work that it has."""


T = TypeVar("T", bound=Target)


class Candidates(list[T]):
    """Instances of one router to choose among, and their loads as vectors in the same order. Never changed once it is
    made.

    `memo` is for whoever concludes something from these instances, which stays true as long as they are the same.
    """

    __slots__ = ("_rows", "_table", "memo")

    def __init__(self, instances: Iterable[T]) -> None:
        super().__init__(instances)
        self.memo: dict[Any, Any] = {}
        loads = [one.load for one in self]
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
        """The load of each as one number: the sum of its parts by these weights, and a constant. `recent_tokens`: those
        that its cache has taken in until `now`, of which older ones count less."""
        recent = recent_tokens and recent_tokens / self._table.scale(now)
        weights = np.array((prefill_tokens, num_prefills, num_decodes, recent, 0.0, constant))
        found: Vector = self._table.numbers[self._rows].dot(weights)
        return found

    @property
    def prefill_tokens(self) -> Vector:
        """Tokens that wait to be computed on each; like the other columns, not to be changed."""
        return self._column(_PREFILL_TOKENS)

    @property
    def num_decodes(self) -> Vector:
        """Answers that each writes or is to write."""
        return self._column(_NUM_DECODES)

    @property
    def last_turn(self) -> Vector:
        """When each was last chosen, as the number of that choice."""
        return self._column(_LAST_TURN)

    def _column(self, column: int) -> Vector:
        found: Vector = self._table.numbers[self._rows, column]
        return found


def candidates(instances: Iterable[T]) -> Candidates[T]:
    """These instances, with their loads as vectors."""
    return instances if isinstance(instances, Candidates) else Candidates(instances)
