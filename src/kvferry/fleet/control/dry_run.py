"""Dry run: the steps that a change will take, computed before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.fleet.control.facts import Drain, ObservedInstance, Phase, Start, Step, StopMember, SwitchRole
from kvferry.fleet.control.loop import plan
from kvferry.fleet.spec.fleet_spec import DesiredFleet


def dry_run_steps(
    fleet: DesiredFleet, members: Sequence[ObservedInstance], now: float = 0.0, max_steps: int = 100_000
) -> list[Step]:
    """All steps until the fleet is in its desired state, if every step succeeds at once. Raises `ConfigError` if it
    cannot reach this state, because the settings do not allow replacing the present instances. Members that start count
    as serving, and members that leave as gone."""
    steps: list[Step] = []
    staying = (member for member in members if member.phase in (Phase.READY, Phase.STARTING))
    present = {instance.name: replace(instance, phase=Phase.READY) for instance in staying}
    fleet = _unpaused(fleet)
    while len(steps) < max_steps:
        new = plan(fleet, list(present.values()), (), now)
        if not new:
            break
        steps += new
        for step in new:
            _imagine(present, step, now)
    if stuck := sorted(instance.name for instance in present.values() if instance.revision != fleet.revision):
        raise ConfigError(explain_blocked_roll(fleet, stuck))
    return steps


def explain_blocked_roll(fleet: DesiredFleet, stuck: Sequence[str]) -> str:
    """The reason why the settings do not allow replacing these instances of another revision."""
    return (
        f"{', '.join(stuck[:3])} {'and others ' if len(stuck) > 3 else ''}could never be replaced: there is no room"
        f" (max) for roll.surge = {fleet.roll.surge}, and roll.unavailable = {fleet.roll.unavailable} lets too few be"
        " missing; raise one"
    )


def _unpaused(fleet: DesiredFleet) -> DesiredFleet:
    return msgspec.structs.replace(fleet, roll=msgspec.structs.replace(fleet.roll, pause=False))


def _imagine(present: dict[str, ObservedInstance], step: Step, now: float) -> None:
    match step:
        case Start():
            present[step.name] = ObservedInstance(step.name, step.role, step.revision, Phase.READY, now, step.unit)
        case SwitchRole():
            present[step.name] = replace(present[step.name], role=step.role, phase=Phase.READY, since=now)
        case Drain() | StopMember():
            present.pop(step.name, None)
