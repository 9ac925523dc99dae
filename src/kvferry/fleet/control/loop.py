"""The next steps of a fleet, from its desired and its observed state. A pure function: it starts nothing, waits for
nothing and remembers nothing, so the same facts give the same steps.

    stop finished      failed, drained, not drained in time, not serving in time
    pause?             nothing else
    replace units      of which a member has failed, if restart = "unit"
    switch roles       where one role has too many and another too few
    shrink             surplus replicas are drained
    fill               missing replicas are started, in the current revision, after the backoff of failures
    roll               replicas of old revisions are replaced, a few at a time

P and D of different revisions may not understand each other's KV. So an instance counts as *effective* only if there
is a ready one of every other role in its revision, and none is drained on account of which fewer than `count -
unavailable` would be effective in any role: the last P of the old revision goes when there are enough D of the new one.
Nor is one drained on account of which fewer than that, or than `min`, would be ready at all.

In replica mode a replica is a unit: all its members, which hand over among themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.fleet.control.backoff import start_backoff
from kvferry.fleet.control.facts import Drain, Failure, ObservedInstance, Phase, Start, Step, StopMember, SwitchRole
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, RoleSpec, seconds

UNIT = "unit"
_LEAVING = (Phase.DRAINING, Phase.DRAINED, Phase.FAILED)


@dataclass(frozen=True)
class Replica:
    """An instance, whose `kind` is its role, or a unit: started, drained and replaced as a whole."""

    kind: str
    revision: str
    phase: Phase
    since: float
    members: tuple[ObservedInstance, ...]

    @property
    def outstanding(self) -> int:
        return sum([member.outstanding for member in self.members])


def plan(
    fleet: DesiredFleet, members: Sequence[ObservedInstance], failures: Sequence[Failure], now: float
) -> list[Step]:
    """The steps to take now. Empty: the fleet is in its desired state, or steps that were begun have not ended.
    `failures`: the recent failures, oldest first."""
    plan_round = _PlanRound(fleet, members, failures, now)
    plan_round.stop_finished()
    if not fleet.roll.pause:
        plan_round.replace_failed_units()
        plan_round.switch_roles()
        plan_round.shrink()
        plan_round.fill()
        plan_round.roll()
    return plan_round.steps


class _PlanRound:
    """One round: the replicas that stay, and the steps so far. Every step changes the replicas as if it had been done,
    so that the next step takes it into account."""

    def __init__(
        self, fleet: DesiredFleet, members: Sequence[ObservedInstance], failures: Sequence[Failure], now: float
    ) -> None:
        self._fleet, self._members, self._failures, self._now = fleet, members, list(failures), now
        self._revision = fleet.revision
        self._names = {member.name for member in members} | {member.unit for member in members}
        self._next_number = Counter[str]()
        self._backed_off = dict[MemberRole, bool]()
        self.steps: list[Step] = []
        self._replicas: dict[int, Replica] = {}
        """The replicas by their identity."""
        self._num, self._num_updated = Counter[str](), Counter[str]()
        """Replicas of each kind; replicas of the current revision."""
        self._num_leaving = Counter(
            kind
            for kind, _ in {
                (member.role, member.name) if fleet.unit is None else (UNIT, member.unit)
                for member in members
                if member.phase in _LEAVING
            }
        )
        """Number of replicas of each kind that are leaving. They count against the maximum until they are gone."""
        for replica in _replicas(fleet, [member for member in members if member.phase not in _LEAVING]):
            self._add(replica)

    def _add(self, replica: Replica) -> None:
        self._replicas[id(replica)] = replica
        self._num[replica.kind] += 1
        self._num_updated[replica.kind] += replica.revision == self._revision

    def _drop(self, replica: Replica) -> None:
        del self._replicas[id(replica)]
        self._num[replica.kind] -= 1
        self._num_updated[replica.kind] -= replica.revision == self._revision

    # The desired and the present replicas.

    @property
    def _kinds(self) -> Iterator[tuple[str, int, int]]:
        """Each kind, with the desired and the maximum number of its replicas."""
        fleet, surge = self._fleet, self._fleet.roll.surge
        if fleet.unit is not None:
            yield UNIT, fleet.unit.count, fleet.unit.count + surge if fleet.unit.max is None else fleet.unit.max
            return
        for role, role_spec in fleet.role.items():
            yield role, role_spec.count, role_spec.count + surge if role_spec.max is None else role_spec.max
        for kind in [kind for kind in self._num if kind not in fleet.role]:
            yield kind, 0, 0  # a role that the spec no longer has

    def _of_kind(self, kind: str) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.kind == kind]

    # The parts of a round.

    def stop_finished(self) -> None:
        """Stop members that have ended, have been drained, or take too long."""
        failing = self._fleet.failure
        for member in self._members:
            for_s = self._now - member.since
            if member.phase is Phase.FAILED:
                self._fail(member, member.reason or "it ended")
            elif member.phase is Phase.DRAINED:
                self.steps.append(StopMember(member.name, "drained"))
            elif member.phase is Phase.DRAINING and for_s >= seconds(failing.drain):
                self.steps.append(StopMember(member.name, f"not drained within {failing.drain}"))
        for replica in list(self._replicas.values()):
            if replica.phase is Phase.STARTING and self._now - replica.since >= seconds(failing.start):
                self._remove(
                    replica,
                    f"does not serve after {failing.start} (start in [failure], --start-timeout-s)",
                    failed=True,
                )

    def replace_failed_units(self) -> None:
        """Replace units as a whole of which a member has failed, with restart = "unit"."""
        if self._fleet.failure.restart == "unit":
            lost = {member.unit for member in self._members if member.phase is Phase.FAILED and member.unit}
            for replica in [unit for unit in self._of_kind(UNIT) if unit.members[0].unit in lost]:
                self._remove(replica, "another member of its unit failed")

    def switch_roles(self) -> None:
        """Switch surplus instances to a role of which there are too few, rather than end them."""
        if self._fleet.unit is not None:
            return
        missing = {kind: num - self._num[kind] for kind, num, _ in self._kinds}
        room = {kind: max_num - self._num_leaving[kind] - self._num[kind] for kind, _, max_num in self._kinds}
        for role, role_spec in self._fleet.role.items():
            replicas = [
                replica
                for replica in self._of_kind(role)
                if (replica.phase, replica.revision) == (Phase.READY, self._revision)
            ]
            replicas.sort(key=_drain_order)
            for other in role_spec.can_be:
                for replica in replicas[: max(0, min(-missing[role], missing.get(other, 0), room.get(other, 0)))]:
                    replicas.remove(replica)
                    reason = f"{role} has {-missing[role]} too many, {other} {missing[other]} too few"
                    self.steps.append(SwitchRole(replica.members[0].name, other, reason))
                    self._drop(replica)
                    self._add(replace(replica, kind=other, phase=Phase.STARTING, since=self._now))
                    missing[role] += 1
                    missing[other] -= 1
                    room[other] -= 1

    def shrink(self) -> None:
        """Drain surplus replicas, except those that a roll has started in advance."""
        for kind, desired, max_num in self._kinds:
            replicas = self._of_kind(kind)
            rolling = 0 < self._num_updated[kind] < len(replicas)
            surplus = len(replicas) - (
                max(desired, min(desired + self._fleet.roll.surge, max_num)) if rolling else desired
            )
            if surplus <= 0:
                continue
            num_ready = sum(member.phase is Phase.READY for member in replicas)
            for replica in sorted(
                replicas, key=lambda candidate: (candidate.revision == self._revision, *_drain_order(candidate))
            ):
                is_ready = replica.phase is Phase.READY
                if surplus > 0 and (
                    not is_ready or num_ready > desired
                ):  # a replica that starts does not replace it yet
                    self._remove(replica, f"{desired} desired, {len(replicas)} exist")
                    surplus, num_ready = surplus - 1, num_ready - is_ready

    def fill(self) -> None:
        """Start missing replicas."""
        for replica in self._of_kind(UNIT):
            self._complete(replica)
        for kind, desired, max_num in self._kinds:
            for _ in range(min(desired, max_num - self._num_leaving[kind]) - self._num[kind]):
                if not self._start(kind, f"{desired} desired"):
                    break

    def roll(self) -> None:
        """Replace replicas of old revisions: start as many new ones as allowed, and drain old ones that are not
        needed."""
        reason = f"revision {self._revision} is desired"
        for replica in [old for old in self._old() if old.phase is Phase.STARTING]:
            self._remove(replica, reason)
        if not self._old():
            return
        desired = {kind: num for kind, num, _ in self._kinds if num}
        room = {kind: min(num + self._fleet.roll.surge, max_num) for kind, num, max_num in self._kinds}
        while kinds := [kind for kind in desired if self._may_surge(kind, desired, room[kind])]:
            if not self._start(min(kinds, key=lambda kind: self._num_updated[kind] / desired[kind]), reason):
                return  # no further replicas are drained while new ones fail
        min_effective = {kind: num - self._fleet.roll.unavailable for kind, num in desired.items()}
        ready = _Ready(
            [replica for replica in self._replicas.values() if replica.phase is Phase.READY],
            min_effective,
            self._fleet.role,
        )
        needed = set[tuple[str, str]]()
        """Kinds and revisions of which no replica can be drained until another one is."""
        for replica in sorted(self._old(), key=_drain_order):
            if (replica.kind, replica.revision) in needed:
                continue
            if ready.try_remove(replica):
                self._remove(replica, reason)
                needed.clear()
            else:
                needed.add((replica.kind, replica.revision))

    def _old(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.revision != self._revision]

    def _may_surge(self, kind: str, desired: Mapping[str, int], room: int) -> bool:
        """True if another replica of the current revision can be started in advance: there is room, and the kind is
        not too far ahead of the others."""
        updated = self._num_updated
        if updated[kind] >= desired[kind] or self._num[kind] + self._num_leaving[kind] >= room:
            return False
        share, next_share = updated[kind] / desired[kind], (updated[kind] + 1) / desired[kind]
        skew = self._fleet.roll.max_skew
        return all(
            share <= updated[other] / desired[other] or next_share <= (updated[other] + skew) / desired[other]
            for other in desired
        )

    # Steps.

    def _start(self, kind: str, reason: str) -> bool:
        """Start one more replica, unless failures forbid it."""
        roles = self._roles(kind)
        if any(map(self._is_backed_off, roles)):
            return False
        self._add(Replica(kind, self._revision, Phase.STARTING, self._now, ()))
        if self._fleet.unit is None:
            self._start_members(roles[0], roles[0], 1, reason)
        else:
            unit = self._free_name(UNIT)
            for role, num in self._fleet.unit.members.items():
                self._start_members(f"{unit}-{role}", role, num, reason, unit)
        return True

    def _complete(self, replica: Replica) -> None:
        """Start the members that a unit of the current revision lacks."""
        if self._fleet.unit is None or replica.revision != self._revision:
            return
        unit = replica.members[0].unit
        for role, num in self._fleet.unit.members.items():
            lacking = num - sum(member.role == role for member in replica.members)
            if lacking > 0 and not self._is_backed_off(role):
                self._start_members(f"{unit}-{role}", role, lacking, f"{unit} lacks {lacking}", unit)

    def _start_members(self, prefix: str, role: MemberRole, number: int, reason: str, unit: str = "") -> None:
        for _ in range(number):
            self.steps.append(Start(self._free_name(prefix), role, self._revision, reason, unit))

    def _remove(self, replica: Replica, reason: str, *, failed: bool = False) -> None:
        """Drain a replica's members; those that do not serve yet are stopped."""
        self._drop(replica)
        self._num_leaving[replica.kind] += 1
        for member in replica.members:
            if failed:
                self._fail(member, reason)
            else:
                self.steps.append((StopMember if member.phase is Phase.STARTING else Drain)(member.name, reason))

    def _fail(self, member: ObservedInstance, reason: str) -> None:
        self.steps.append(StopMember(member.name, reason, failed=True))
        self._failures.append(Failure(member.role, member.revision, self._now, reason))

    def _roles(self, kind: str) -> tuple[MemberRole, ...]:
        return tuple(self._fleet.unit.members) if self._fleet.unit is not None else (kind,)  # type: ignore[return-value]

    def _free_name(self, prefix: str) -> str:
        while (name := f"{prefix}-{self._next_number[prefix]}") in self._names:
            self._next_number[prefix] += 1
        self._names.add(name)
        return name

    def _is_backed_off(self, role: MemberRole) -> bool:
        if role not in self._backed_off:
            self._backed_off[role] = (
                start_backoff(self._fleet, role, self._members, self._failures, self._now) is not None
            )
        return self._backed_off[role]


class _Ready:
    """Numbers of ready and of effective replicas by kind and revision. `min_effective`: how many must stay effective,
    of each desired kind."""

    def __init__(
        self, ready: Iterable[Replica], min_effective: Mapping[str, int], roles: Mapping[MemberRole, RoleSpec]
    ) -> None:
        self._min_effective, self._min = min_effective, {str(role): role_spec.min for role, role_spec in roles.items()}
        self._number = defaultdict[str, Counter[str]](Counter)
        for replica in ready:
            self._number[replica.revision][replica.kind] += 1
        self._total, self._effective = Counter[str](), Counter[str]()
        for number in self._number.values():
            self._total.update(number)
            if self._is_complete(number):
                self._effective.update(number)

    def try_remove(self, replica: Replica) -> bool:
        """True if the replica can be drained. It then no longer counts as ready. The result is the same for all
        replicas of one kind and revision, until one can be drained."""
        kind, effective = replica.kind, self._effective
        if self._total[kind] <= max(self._min_effective.get(kind, 0), self._min.get(kind, 0)):
            return False
        lost = self._lost_without(replica)
        if any(
            effective[lost_kind] - num < min(effective[lost_kind], self._min_effective[lost_kind])
            for lost_kind, num in lost.items()
        ):
            return False
        for lost_kind, num in lost.items():
            effective[lost_kind] -= num
        self._number[replica.revision][kind] -= 1
        self._total[kind] -= 1
        return True

    def _lost_without(self, replica: Replica) -> dict[str, int]:
        """Number of replicas of each kind that would no longer be effective without it."""
        number = self._number[replica.revision]
        if replica.kind not in self._min_effective or not self._is_complete(number):
            return {}
        return {replica.kind: 1} if number[replica.kind] > 1 else {kind: number[kind] for kind in self._min_effective}

    def _is_complete(self, number: Mapping[str, int]) -> bool:
        """True if a revision with these numbers of ready replicas has every kind, so that they are effective."""
        return all(number[kind] > 0 for kind in self._min_effective)


def _replicas(fleet: DesiredFleet, members: Iterable[ObservedInstance]) -> Iterator[Replica]:
    if fleet.unit is None:
        for member in members:
            yield Replica(member.role, member.revision, member.phase, member.since, (member,))
        return
    units = defaultdict[str, list[ObservedInstance]](list)
    for member in members:
        units[member.unit].append(member)
    unit_size = sum(fleet.unit.members.values())
    for unit_members in units.values():
        starting = [member.since for member in unit_members if member.phase is Phase.STARTING]
        is_ready = not starting and (len(unit_members) == unit_size or unit_members[0].revision != fleet.revision)
        since = max(member.since for member in unit_members) if not starting else min(starting)
        yield Replica(
            UNIT, unit_members[0].revision, Phase.READY if is_ready else Phase.STARTING, since, tuple(unit_members)
        )


def _drain_order(replica: Replica) -> tuple[bool, int, float, str]:
    """Sort key of replicas to drain: first those not ready, with the fewest requests, ready for the shortest time."""
    name = replica.members[0].name if replica.members else ""
    return replica.phase is Phase.READY, replica.outstanding, -replica.since, name
