"""A set whose order is the same in each run of a program, for sets that are iterated over. The order of a `set` depends
on the addresses of objects, and on a random seed for the hashes of strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import TypeVar

Member = TypeVar("Member")


class OrderedSet(MutableSet[Member]):
    """Members in the order in which they were added."""

    __slots__ = ("_members",)

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._members = dict.fromkeys(members)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, value: Member) -> None:
        """Add it behind the others, unless it is a member."""
        self._members[value] = None

    def discard(self, value: Member) -> None:
        """Remove it if it is a member."""
        self._members.pop(value, None)
