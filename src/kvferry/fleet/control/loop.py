"""The next steps of a fleet, from what it is to be and what is known of it. A function: it starts nothing, waits for
nothing and remembers nothing, so the same facts give the same steps, whoever asks.

    end what is over   failed, drained, not drained in time, not serving in time
    pause?             nothing else
    give up units      of which a member has failed, if restart = "unit"
    change roles       where one role has too many and another too few
    shrink             what is too much is drained
    fill               what is missing is started, in the current revision, after the waits that failures ask for
    roll               instances of old revisions are replaced, a few at a time

P and D of different revisions may not understand each other's KV. So an instance counts as *effective* only if there
is a ready one of every other role in its revision, and none is drained on account of which fewer than `count -
unavailable` would be effective in any role: the last P of the old revision goes when there are enough D of the new one.
Nor is one drained on account of which fewer than that, or than `min`, would be ready at all.

In replica mode what is started, scaled and replaced is a unit: all its members, which hand over among themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.fleet.control.backoff import held_back
from kvferry.fleet.control.facts import Drain, Failure, ObservedInstance, Phase, Start, Step, StopMember, SwitchRole
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, RoleSpec, seconds

UNIT = "unit"
_LEAVING = (Phase.DRAINING, Phase.DRAINED, Phase.FAILED)


@dataclass(frozen=True)
class Item:
    """What is started, drained and replaced as one: an instance, whose `kind` is its role, or a unit."""

    kind: str
    revision: str
    phase: Phase
    since: float
    members: tuple[ObservedInstance, ...]

    @property
    def outstanding(self) -> int:
        return sum([one.outstanding for one in self.members])


def plan(
    fleet: DesiredFleet, members: Sequence[ObservedInstance], failures: Sequence[Failure], now: float
) -> list[Step]:
    """The steps to take now; none: everything is as it is to be, or has to be waited for. `failures`: those that are
    remembered, oldest first."""
    tick = _Tick(fleet, members, failures, now)
    tick.end_what_is_over()
    if not fleet.roll.pause:
        tick.give_up_units()
        tick.change_roles()
        tick.shrink()
        tick.fill()
        tick.roll()
    return tick.steps


class _Tick:
    """One round: the items that are here to stay, and the steps so far. Every step changes the items as if it had been
    done, so that the next one counts on it."""

    def __init__(
        self, fleet: DesiredFleet, members: Sequence[ObservedInstance], failures: Sequence[Failure], now: float
    ) -> None:
        self._fleet, self._members, self._failures, self._now = fleet, members, list(failures), now
        self._revision = fleet.revision
        self._names = {one.name for one in members} | {one.unit for one in members}
        self._next_number = Counter[str]()
        self._held = dict[MemberRole, bool]()
        self.steps: list[Step] = []
        self._items: dict[int, Item] = {}
        """The items by their identity."""
        self._num, self._num_updated = Counter[str](), Counter[str]()
        """Items of each kind; those of the current revision."""
        self._num_leaving = Counter(
            kind
            for kind, _ in {
                (one.role, one.name) if fleet.unit is None else (UNIT, one.unit)
                for one in members
                if one.phase in _LEAVING
            }
        )
        """How many items of each kind are leaving: they take room until they are gone."""
        for item in _items(fleet, [one for one in members if one.phase not in _LEAVING]):
            self._add(item)

    def _add(self, item: Item) -> None:
        self._items[id(item)] = item
        self._num[item.kind] += 1
        self._num_updated[item.kind] += item.revision == self._revision

    def _drop(self, item: Item) -> None:
        del self._items[id(item)]
        self._num[item.kind] -= 1
        self._num_updated[item.kind] -= item.revision == self._revision

    # What is wanted, and what is there.

    @property
    def _kinds(self) -> Iterator[tuple[str, int, int]]:
        """Each kind, how many are wanted, and how many there may be at most."""
        fleet, surge = self._fleet, self._fleet.roll.surge
        if fleet.unit is not None:
            yield UNIT, fleet.unit.count, fleet.unit.count + surge if fleet.unit.max is None else fleet.unit.max
            return
        for role, one in fleet.role.items():
            yield role, one.count, one.count + surge if one.max is None else one.max
        for kind in [kind for kind in self._num if kind not in fleet.role]:
            yield kind, 0, 0  # a role that is wanted no more

    def _of(self, kind: str) -> list[Item]:
        return [one for one in self._items.values() if one.kind == kind]

    # The parts of a round.

    def end_what_is_over(self) -> None:
        """Stop members that have ended, have been drained, or take too long."""
        failing = self._fleet.failure
        for one in self._members:
            for_s = self._now - one.since
            if one.phase is Phase.FAILED:
                self._fail(one, one.reason or "it ended")
            elif one.phase is Phase.DRAINED:
                self.steps.append(StopMember(one.name, "drained"))
            elif one.phase is Phase.DRAINING and for_s >= seconds(failing.drain):
                self.steps.append(StopMember(one.name, f"not drained within {failing.drain}"))
        for item in list(self._items.values()):
            if item.phase is Phase.STARTING and self._now - item.since >= seconds(failing.start):
                self._remove(
                    item, f"does not serve after {failing.start} (start in [failure], --start-timeout-s)", failed=True
                )

    def give_up_units(self) -> None:
        """Replace units as a whole of which a member has failed, if that is what is wanted."""
        if self._fleet.failure.restart == "unit":
            lost = {one.unit for one in self._members if one.phase is Phase.FAILED and one.unit}
            for item in [one for one in self._of(UNIT) if one.members[0].unit in lost]:
                self._remove(item, "another member of its unit failed")

    def change_roles(self) -> None:
        """Instances that can change to a role of which there are too few do so, rather than end."""
        if self._fleet.unit is not None:
            return
        missing = {kind: num - self._num[kind] for kind, num, _ in self._kinds}
        room = {kind: most - self._num_leaving[kind] - self._num[kind] for kind, _, most in self._kinds}
        for role, one in self._fleet.role.items():
            able = [item for item in self._of(role) if (item.phase, item.revision) == (Phase.READY, self._revision)]
            able.sort(key=_least_missed)
            for other in one.can_be:
                for item in able[: max(0, min(-missing[role], missing.get(other, 0), room.get(other, 0)))]:
                    able.remove(item)
                    why = f"{role} has {-missing[role]} too many, {other} {missing[other]} too few"
                    self.steps.append(SwitchRole(item.members[0].name, other, why))
                    self._drop(item)
                    self._add(replace(item, kind=other, phase=Phase.STARTING, since=self._now))
                    missing[role] += 1
                    missing[other] -= 1
                    room[other] -= 1

    def shrink(self) -> None:
        """Drain what is too much; what a roll has started in advance is not."""
        for kind, wanted, most in self._kinds:
            here = self._of(kind)
            rolling = 0 < self._num_updated[kind] < len(here)
            surplus = len(here) - (max(wanted, min(wanted + self._fleet.roll.surge, most)) if rolling else wanted)
            if surplus <= 0:
                continue
            num_ready = sum(one.phase is Phase.READY for one in here)
            for item in sorted(here, key=lambda one: (one.revision == self._revision, *_least_missed(one))):
                is_ready = item.phase is Phase.READY
                if surplus > 0 and (not is_ready or num_ready > wanted):  # what starts does not take its place yet
                    self._remove(item, f"{wanted} wanted, {len(here)} there")
                    surplus, num_ready = surplus - 1, num_ready - is_ready

    def fill(self) -> None:
        """Start what is missing."""
        for item in self._of(UNIT):
            self._complete(item)
        for kind, wanted, most in self._kinds:
            for _ in range(min(wanted, most - self._num_leaving[kind]) - self._num[kind]):
                if not self._start(kind, f"{wanted} wanted"):
                    break

    def roll(self) -> None:
        """Replace items of old revisions: start as many as there is room for, and drain those that can be missed."""
        why = f"revision {self._revision} is wanted"
        for item in [one for one in self._old() if one.phase is Phase.STARTING]:
            self._remove(item, why)
        if not self._old():
            return
        wanted = {kind: num for kind, num, _ in self._kinds if num}
        room = {kind: min(num + self._fleet.roll.surge, most) for kind, num, most in self._kinds}
        while kinds := [kind for kind in wanted if self._may_begin(kind, wanted, room[kind])]:
            if not self._start(min(kinds, key=lambda one: self._num_updated[one] / wanted[one]), why):
                return  # what failed so far is to be understood before more is drained for it
        least = {kind: num - self._fleet.roll.unavailable for kind, num in wanted.items()}
        ready = _Ready([one for one in self._items.values() if one.phase is Phase.READY], least, self._fleet.role)
        kept = set[tuple[str, str]]()
        """Kinds and revisions of which none can be missed until another one is drained."""
        for item in sorted(self._old(), key=_least_missed):
            if (item.kind, item.revision) in kept:
                continue
            if ready.can_miss(item):
                self._remove(item, why)
                kept.clear()
            else:
                kept.add((item.kind, item.revision))

    def _old(self) -> list[Item]:
        return [one for one in self._items.values() if one.revision != self._revision]

    def _may_begin(self, kind: str, wanted: Mapping[str, int], room: int) -> bool:
        """Whether one more of the current revision can be started in advance: there is room, and the kind is not too
        far ahead of the others."""
        updated = self._num_updated
        if updated[kind] >= wanted[kind] or self._num[kind] + self._num_leaving[kind] >= room:
            return False
        share, next_share = updated[kind] / wanted[kind], (updated[kind] + 1) / wanted[kind]
        skew = self._fleet.roll.max_skew
        return all(
            share <= updated[one] / wanted[one] or next_share <= (updated[one] + skew) / wanted[one] for one in wanted
        )

    # Steps.

    def _start(self, kind: str, why: str) -> bool:
        """Start one more item, unless failures forbid it."""
        roles = self._roles(kind)
        if any(map(self._held_back, roles)):
            return False
        self._add(Item(kind, self._revision, Phase.STARTING, self._now, ()))
        if self._fleet.unit is None:
            self._start_members(roles[0], roles[0], 1, why)
        else:
            unit = self._free(UNIT)
            for role, num in self._fleet.unit.members.items():
                self._start_members(f"{unit}-{role}", role, num, why, unit)
        return True

    def _complete(self, item: Item) -> None:
        """Start the members that a unit of the current revision lacks."""
        if self._fleet.unit is None or item.revision != self._revision:
            return
        unit = item.members[0].unit
        for role, num in self._fleet.unit.members.items():
            lacking = num - sum(one.role == role for one in item.members)
            if lacking > 0 and not self._held_back(role):
                self._start_members(f"{unit}-{role}", role, lacking, f"{unit} lacks {lacking}", unit)

    def _start_members(self, prefix: str, role: MemberRole, number: int, why: str, unit: str = "") -> None:
        for _ in range(number):
            self.steps.append(Start(self._free(prefix), role, self._revision, why, unit))

    def _remove(self, item: Item, why: str, *, failed: bool = False) -> None:
        """Drain an item's members; those that do not serve yet are stopped."""
        self._drop(item)
        self._num_leaving[item.kind] += 1
        for one in item.members:
            if failed:
                self._fail(one, why)
            else:
                self.steps.append((StopMember if one.phase is Phase.STARTING else Drain)(one.name, why))

    def _fail(self, member: ObservedInstance, why: str) -> None:
        self.steps.append(StopMember(member.name, why, failed=True))
        self._failures.append(Failure(member.role, member.revision, self._now, why))

    def _roles(self, kind: str) -> tuple[MemberRole, ...]:
        return tuple(self._fleet.unit.members) if self._fleet.unit is not None else (kind,)  # type: ignore[return-value]

    def _free(self, prefix: str) -> str:
        while (name := f"{prefix}-{self._next_number[prefix]}") in self._names:
            self._next_number[prefix] += 1
        self._names.add(name)
        return name

    def _held_back(self, role: MemberRole) -> bool:
        if role not in self._held:
            self._held[role] = held_back(self._fleet, role, self._members, self._failures, self._now) is not None
        return self._held[role]


class _Ready:
    """How many of each kind are ready in each revision, and which of them are effective. `least`: how many are to be,
    of the kinds that are wanted."""

    def __init__(self, ready: Iterable[Item], least: Mapping[str, int], roles: Mapping[MemberRole, RoleSpec]) -> None:
        self._least, self._min = least, {str(role): one.min for role, one in roles.items()}
        self._number = defaultdict[str, Counter[str]](Counter)
        for one in ready:
            self._number[one.revision][one.kind] += 1
        self._total, self._effective = Counter[str](), Counter[str]()
        for number in self._number.values():
            self._total.update(number)
            if self._is_whole(number):
                self._effective.update(number)

    def can_miss(self, item: Item) -> bool:
        """Whether it can be drained; if so, it is ready no more. Answers the same for all of one kind and revision,
        until one can."""
        kind, effective = item.kind, self._effective
        if self._total[kind] <= max(self._least.get(kind, 0), self._min.get(kind, 0)):
            return False
        lost = self._lost_without(item)
        if any(effective[one] - num < min(effective[one], self._least[one]) for one, num in lost.items()):
            return False
        for one, num in lost.items():
            effective[one] -= num
        self._number[item.revision][kind] -= 1
        self._total[kind] -= 1
        return True

    def _lost_without(self, item: Item) -> dict[str, int]:
        """How many of each kind are effective no more without it."""
        number = self._number[item.revision]
        if item.kind not in self._least or not self._is_whole(number):
            return {}
        return {item.kind: 1} if number[item.kind] > 1 else {kind: number[kind] for kind in self._least}

    def _is_whole(self, number: Mapping[str, int]) -> bool:
        """Whether a revision with these numbers of ready ones has one of every kind, which are then effective."""
        return all(number[kind] > 0 for kind in self._least)


def _items(fleet: DesiredFleet, members: Iterable[ObservedInstance]) -> Iterator[Item]:
    if fleet.unit is None:
        for one in members:
            yield Item(one.role, one.revision, one.phase, one.since, (one,))
        return
    units = defaultdict[str, list[ObservedInstance]](list)
    for one in members:
        units[one.unit].append(one)
    wanted = sum(fleet.unit.members.values())
    for here in units.values():
        starting = [one.since for one in here if one.phase is Phase.STARTING]
        is_ready = not starting and (len(here) == wanted or here[0].revision != fleet.revision)
        since = max(one.since for one in here) if not starting else min(starting)
        yield Item(UNIT, here[0].revision, Phase.READY if is_ready else Phase.STARTING, since, tuple(here))


def _least_missed(item: Item) -> tuple[bool, int, float, str]:
    """Sorts first who serves least: not yet at all, with the fewest requests, for the shortest time."""
    name = item.members[0].name if item.members else ""
    return item.phase is Phase.READY, item.outstanding, -item.since, name
