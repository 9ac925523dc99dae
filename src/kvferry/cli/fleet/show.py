"""Shows a fleet's status, and the steps of a change, as text."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvferry.cli.fleet.controllers import existing_ledger, last_error
from kvferry.fleet.control.dry_run import dry_run_steps
from kvferry.fleet.control.facts import (
    Drain,
    MemberStatus,
    ObservedInstance,
    Phase,
    Start,
    Step,
    StopMember,
    SwitchRole,
)
from kvferry.fleet.control.ledger import Event, Ledger
from kvferry.fleet.places import fleet_names
from kvferry.fleet.spec.fleet_spec import DesiredFleet


def status(
    name: Annotated[str | None, Parameter(help="Name of the fleet. Default: all.")] = None,
    *,
    history: Annotated[bool, Parameter(help="Show each step that was taken, and why.", negative=())] = False,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
) -> int:
    """Show a fleet. For each role: the number of members that are desired, ready, of the current revision, and
    draining; and what failed.

    The exit code is 1 if a fleet has no controller: the last known state is then shown, and may be out of date.
    """
    names = fleet_names() if name is None else [name]
    if not names:
        sys.stderr.write("kvferry: there are no fleets; `kvferry fleet apply SPEC` makes one\n")
    are_current = True
    for fleet_name in names:
        ledger = existing_ledger(fleet_name)
        is_current = ledger.current_status() is not None
        are_current &= is_current
        if json:
            shown = {
                "wanted": ledger.desired_state(),
                "status": ledger.status(),
                "is_current": is_current,
                "has_controller": ledger.has_controller,
            }
            events = {"history": list(ledger.history())} if history else {}
            sys.stdout.buffer.write(msgspec.json.encode({**shown, **events}) + b"\n")
            continue
        for line in _history(ledger) if history else _overview(fleet_name, ledger):
            sys.stdout.write(line + "\n")
    return 0 if history or are_current else 1


def _history(ledger: Ledger) -> list[str]:
    return [f"{_when(event.at)} {event_text(event)}" for event in ledger.history()]


def _when(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # the file was changed by another program
        return f"{at:g}"


def event_text(event: Event) -> str:
    """A step or an event, in one line."""
    return " ".join(filter(None, (event.what, event.name))) + (f": {event.reason}" if event.reason else "")


def _overview(name: str, ledger: Ledger) -> list[str]:
    desired, seen = ledger.desired_state(), ledger.status()
    fleet = desired.fleet
    head = f"{name}  {fleet.model}  {fleet.mode}  revision {fleet.revision}"
    lines = [head + ("  paused" if fleet.roll.pause else "") + ("  ending" if desired.deleted else "")]
    if not ledger.has_controller:
        then = f"{'delete' if desired.deleted else 'resume'} {name}"
        reason = f" ({last})" if (last := last_error(ledger)) else ""
        lines.append(f"  no controller looks after it{reason}; `kvferry fleet {then}` starts one")
    elif (holder := ledger.controller) is not None and holder.hangs:
        problem = f"its controller (process {holder.pid}) has hung for {holder.silent_s:.0f} s"
        lines.append(f"  {problem}; `kvferry fleet resume {name}` replaces it")
    if seen is None:
        return lines
    if ledger.current_status() is None:
        lines.append(f"  as of {_when(seen.at)}, when it changed last; whether it is still so is not known:")
    if seen.url:
        lines.append(f"  {seen.url}")
    of_roles = {f"{role}: {status.failed}" for role, status in seen.roles.items()}  # which are in the table
    lines += [f"  {trouble}" for trouble in seen.trouble if trouble not in of_roles]
    if seen.decided:
        lines.append(f"  {'would be ' if fleet.scale and fleet.scale.recommend else ''}scaled: {seen.decided}")
    lines.append(f"  {'role':<9} {'desired':>7} {'ready':>6} {'current':>8} {'starting':>9} {'draining':>9}")
    for role, status in seen.roles.items():
        figures = f"{status.desired:>7} {status.ready:>6} {status.updated:>8} {status.starting:>9} {status.draining:>9}"
        lines.append(f"  {role:<9} {figures}" + (f"  failed: {status.failed}" if status.failed else ""))
    for member in seen.members:
        detail = f"  {member.detail}" if member.detail else ""
        unit = f"  {member.unit}" if member.unit else ""
        lines.append(
            f"    {member.name:<14} {member.role:<8} {member.phase:<9} {member.revision}  {member.url}{unit}{detail}"
        )
    return lines


def show_steps(ledger: Ledger, fleet: DesiredFleet) -> int:
    """Print the steps that would change the fleet to this spec, without any change. Raises `ConfigError`."""
    seen = ledger.current_status()
    members = [_observed(member) for member in ([] if seen is None else seen.members) if member.role != "router"]
    steps = dry_run_steps(fleet, members)
    for step in steps:
        sys.stdout.write(f"{_step(step)}\n")
    if not steps:
        sys.stdout.write("nothing would change\n")
    return 0


def _observed(member: MemberStatus) -> ObservedInstance:
    return ObservedInstance(member.name, member.role, member.revision, Phase(member.phase), -member.for_s, member.unit)


def _step(step: Step) -> str:
    match step:
        case Start(name, role, revision, reason):
            return f"+ start {name} ({role}, revision {revision}): {reason}"
        case Drain(name, reason):
            return f"- drain {name}: {reason}"
        case StopMember(name, reason):
            return f"- stop {name}: {reason}"
        case SwitchRole(name, role, reason):
            return f"~ {name} becomes {role}: {reason}"
