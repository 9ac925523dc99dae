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
"""After which what an instance's cache has taken in counts half."""

_MOST_HALF_LIVES = 64
"""After which `LoadTable` scales its column anew, long before a number is too large."""

_PREFILL_TOKENS, _NUM_PREFILLS, _NUM_DECODES, _RECENT, _LAST_TURN, _ONE = range(6)


class LoadTable:
    """A row of numbers for each instance. Those in the column `_RECENT` are scaled: a token that was taken in at
    `_since` counts 1, and later ones more, so that time changes all rows by a common factor."""

    def __init__(self) -> None:
        self._since = 0.0
        self._num_rows, self._free = 0, list[int]()
        self.numbers = np.zeros((8, 6))
        self.numbers[:, _ONE] = 1.0
        self.cells: Any = self.numbers.data
        """The same numbers: single ones are read and written faster here."""

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
            self.cells = self.numbers.data
        return self._num_rows - 1

    def free_row(self, row: int) -> None:
        """Its instance is gone."""
        self._free.append(row)

    def scale(self, now: float) -> float:
        """What a token counts that is taken in at `now`."""
        half_lives = (now - self._since) / _HALF_LIFE_S
        if half_lives > _MOST_HALF_LIVES:
            self.numbers[:, _RECENT] *= math.exp2(-min(half_lives, 1000.0))
            self._since, half_lives = now, 0.0
        return math.exp2(half_lives)


def _cell(column: int, about: str) -> Any:
    def get(load: InstanceLoad) -> float:
        number: float = load.table.cells[load.row, column]
        return number

    def put(load: InstanceLoad, value: float) -> None:
        load.table.cells[load.row, column] = value

    return property(get, put, doc=about)


class InstanceLoad:
    """The work that the router has given to one instance: a row of a table, and two counts that no policy asks for.
    Written by the `Work` of each leg, by hand-offs (`num_tickets`), or by a simulator."""

    __slots__ = ("num_legs", "num_tickets", "row", "table")

    def __init__(self, table: LoadTable | None = None) -> None:
        self.table = table or LoadTable()
        self.row = self.table.take_row()
        self.num_legs = 0
        """Legs that are under way there."""
        self.num_tickets = 0
        """Hand-offs of the router's requests for which it may keep blocks."""

    def __del__(self) -> None:
        self.table.free_row(self.row)

    prefill_tokens = _cell(_PREFILL_TOKENS, "Of prompts that it computes or that wait there, without what it had.")
    num_prefills = _cell(_NUM_PREFILLS, "Prompts that it computes or that wait there.")
    num_decodes = _cell(_NUM_DECODES, "Answers that it writes or is to write.")
    last_turn = _cell(_LAST_TURN, "The number of the last choice that was this instance; 0: none.")

    def sent(self, uncached: int, now: float, *, computes: bool, decodes: bool) -> float:
        """A leg is sent to the instance, whose cache takes in this many more tokens, computed or handed over. Returns
        how many were still to be computed there before."""
        cells, row = self.table.cells, self.row
        self.num_legs += 1
        ahead: float = cells[row, _PREFILL_TOKENS]
        if decodes:
            cells[row, _NUM_DECODES] += 1.0
        if computes:
            cells[row, _NUM_PREFILLS] += 1.0
            cells[row, _PREFILL_TOKENS] += uncached
        scale = self.table.scale(now)  # first: it may scale the column
        cells[row, _RECENT] += uncached * scale
        return ahead

    def answered(self, computed: int | None) -> float:
        """A leg is answered, or given up: so many tokens of its prompt are to be computed no longer (None: they never
        were). Returns how many answers run there."""
        cells, row = self.table.cells, self.row
        if computed is not None:
            cells[row, _NUM_PREFILLS] -= 1.0
            cells[row, _PREFILL_TOKENS] -= computed
        running: float = cells[row, _NUM_DECODES]
        return running

    def ended(self, *, decodes: bool) -> None:
        """A leg is over."""
        self.num_legs -= 1
        if decodes:
            self.table.cells[self.row, _NUM_DECODES] -= 1.0

    def note_taken(self, num_tokens: float, now: float) -> None:
        """At `now` on the policy's clock, the instance's cache takes in this many more tokens."""
        scale = self.table.scale(now)  # first: it may scale the column
        self.table.cells[self.row, _RECENT] += num_tokens * scale

    def __repr__(self) -> str:
        return f"InstanceLoad({self.table.numbers[self.row]})"


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
