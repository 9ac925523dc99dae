"""`kvferry fleet apply` and what follows it: a fleet from a spec, changed while it serves.

A controller in the background maintains it. These commands record the desired state, and show the progress.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvferry.cli.fleet.controllers import (
    POLL_INTERVAL_S,
    Fleet,
    control,
    controller_exit_reason,
    existing_ledger,
    is_ending,
    make_backend,
    require_controller,
)
from kvferry.cli.fleet.show import event_text, show_steps, status
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import SECONDS_OR_ZERO
from kvferry.core.settings.options import read_value, unknown_key
from kvferry.fleet.control.ledger import DesiredState, Ledger
from kvferry.fleet.places import ledger_of, running_path
from kvferry.fleet.spec.fleet_spec import DesiredFleet, Number, check_fleet, read_fleet, unrollable_part
from kvferry.models.catalog import resolve

Wait = Annotated[
    float, Parameter(help="Seconds to wait until the fleet is as desired; 0: only write down the desired state.")
]


def apply(
    spec: Annotated[Path, Parameter(help="TOML file that says what the fleet is to be.")],
    *,
    dry_run: Annotated[
        bool, Parameter(help="Show the steps that this would take, and change nothing.", negative=())
    ] = False,
    wait_s: Wait = 600.0,
) -> int:
    """Create a fleet, or change a running one to match its spec.

        kvferry fleet apply chat.toml

    Members keep running when this command ends. A controller in the background replaces members that die; `kvferry
    fleet status` shows them.
    """
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    fleet = read_fleet(spec)
    ledger = ledger_of(fleet.name)
    if fleet.backend.kind == "local":
        resolve(fleet.model)
    require_same_place(ledger, fleet)
    if ledger.exists:
        _require_not_followed(ledger)
    make_backend(running_path(ledger), fleet)
    if dry_run:
        return show_steps(ledger, fleet)
    if (part := unrollable_part(fleet)) and fleet.scale is None:
        reason = f"{part}: with max = count and roll.unavailable = 0, no roll can replace anything"
        sys.stderr.write(f"kvferry: {reason}; raise one of max and roll.unavailable to be able to change settings\n")
    _wait_for_end(ledger, wait_s)
    return _apply_and_follow(ledger, ledger.apply(fleet), wait_s)


def scale(
    name: Fleet,
    counts: Annotated[tuple[str, ...], Parameter(help="How many of what: prefill=3 decode=2; unit=2 in replica mode.")],
    /,
    *,
    wait_s: Wait = 600.0,
) -> int:
    """Change the number of instances of a role, or of units: `kvferry fleet scale chat prefill=3 decode=2`."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)

    def scaled(desired: DesiredState) -> DesiredFleet:
        fleet = desired.fleet
        if fleet.scale is not None and not fleet.scale.recommend:
            reason = "has a table [scale], which decides about its counts; change min and max in its spec"
            raise ConfigError(f"{name} {reason}")
        for count in counts:
            role, _, number = count.partition("=")
            if not (number.isascii() and number.isdecimal()):
                raise ConfigError(f"{count!r} is not a role and a number; write it as prefill=3")
            fleet = _scaled(fleet, role, read_value(role, number, Number))
        return check_fleet(fleet)

    return _change(name, scaled, wait_s)


def roll(name: Fleet, *, wait_s: Wait = 600.0) -> int:
    """Replace every instance and router by a new one with the same settings, a few at a time."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    stamp = f"{SYSTEM_CLOCK.wall():.3f}"
    return _change(name, lambda desired: msgspec.structs.replace(desired.fleet, stamp=stamp), wait_s)


def rollback(
    name: Fleet,
    *,
    to: Annotated[str | None, Parameter(help="Revision, as `status` shows it. Default: the one before.")] = None,
    wait_s: Wait = 600.0,
) -> int:
    """Return a fleet to its settings before its last change of revision, or to the settings of revision --to."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)

    def before(desired: DesiredState) -> DesiredFleet:
        earlier = {past.revision: past for past in desired.earlier}
        if not earlier:
            raise ConfigError(f"{name} has no earlier revision to roll back to")
        revision = to or next(iter(earlier))
        if revision not in earlier:
            raise ConfigError(unknown_key(repr(revision[:40]), revision, earlier, "revision"))
        return earlier[revision]

    return _change(name, before, wait_s)


def pause(name: Fleet) -> int:
    """Start and replace no members, not even members that die, until `kvferry fleet resume`."""
    return _set_pause(name, pause=True)


def resume(name: Fleet, *, wait_s: Wait = 600.0) -> int:
    """Continue after `kvferry fleet pause`."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    return _set_pause(name, pause=False, wait_s=wait_s)


def delete(name: Fleet, *, wait_s: Wait = 600.0) -> int:
    """End a fleet: its routers first, then its instances, each once its running requests have ended."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    ledger = existing_ledger(name)
    _require_not_followed(ledger)
    ledger.delete()
    try:
        return _see_end(ledger, name, wait_s)
    except KeyboardInterrupt:
        sys.stderr.write(f"kvferry: {name} goes on ending without being watched\n")
        return 130


def _set_pause(name: str, *, pause: bool, wait_s: float = 0.0) -> int:
    def set_pause(desired: DesiredState) -> DesiredFleet:
        return msgspec.structs.replace(desired.fleet, roll=msgspec.structs.replace(desired.fleet.roll, pause=pause))

    return _change(name, set_pause, wait_s)


def _scaled(fleet: DesiredFleet, kind: str, number: int) -> DesiredFleet:
    if fleet.unit is not None:
        if kind != "unit":
            raise ConfigError(f"{fleet.name} is in replica mode, where units are scaled: unit={number}")
        return msgspec.structs.replace(fleet, unit=msgspec.structs.replace(fleet.unit, count=number))
    role = next((role_spec for name, role_spec in fleet.role.items() if name == kind), None)
    if role is None:
        raise ConfigError(unknown_key(repr(kind[:40]), kind, fleet.role, "role"))
    return msgspec.structs.replace(fleet, role={**fleet.role, kind: msgspec.structs.replace(role, count=number)})


def _change(name: str, change: Callable[[DesiredState], DesiredFleet], wait_s: float) -> int:
    ledger = existing_ledger(name)
    _require_not_followed(ledger)
    return _apply_and_follow(ledger, ledger.change(change), wait_s)


def _apply_and_follow(ledger: Ledger, desired: DesiredState, wait_s: float) -> int:
    """Have a controller carry out the change, and show its progress."""
    name, begun = desired.fleet.name, SYSTEM_CLOCK.wall()
    try:
        require_controller(ledger, name)
        if desired.fleet.roll.pause:  # waiting longer does not help: the desired state cannot be reached
            until = f"until `kvferry fleet resume {name}`"
            sys.stdout.write(f"{name} is paused: nothing is started, stopped or replaced {until}\n")
            return 0
        return _follow(ledger, desired, begun, wait_s) if wait_s else 0
    except KeyboardInterrupt:
        sys.stderr.write(f"kvferry: {name} goes on without being watched: kvferry fleet status {name}\n")
        return 130


# Conditions for making or changing a fleet.


def _require_not_followed(ledger: Ledger) -> None:
    """Raise `ConfigError` if a controller follows a file, to which it would revert any change."""
    try:
        desired = ledger.desired_state()
    except ConfigError:
        return
    if desired.source and (holder := ledger.controller) is not None and holder.follows_file:
        name = desired.fleet.name
        raise ConfigError(
            f"`kvferry fleet run` keeps {name} as {desired.source} says: change that file, or end it first"
        )


def require_same_place(ledger: Ledger, fleet: DesiredFleet) -> None:
    """Raise `ConfigError` if the backend of a fleet would change: no controller would then find its members."""
    try:
        before = ledger.desired_state()
    except ConfigError:  # there is no such fleet, or its state cannot be read
        return
    kind, new_kind = before.fleet.backend.kind, fleet.backend.kind
    if kind != new_kind and not before.deleted:
        raise ConfigError(
            f"backend.kind cannot be changed from {kind} to {new_kind}: `kvferry fleet delete {fleet.name}` first,"
            " or give one of the two fleets another name"
        )


def _wait_for_end(ledger: Ledger, wait_s: float) -> None:
    """Raise `ConfigError` if the fleet is being deleted: it must end before it is created again."""
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    while ledger.has_controller and is_ending(ledger):
        if SYSTEM_CLOCK.monotonic() >= deadline:
            raise ConfigError(f"{ledger.folder.name} is ending; apply its spec once it has ended")
        time.sleep(POLL_INTERVAL_S)


# What becomes of it.


def _follow(ledger: Ledger, desired: DesiredState, begun: float, wait_s: float, line_interval_s: float = 5.0) -> int:
    """Show the steps since `begun`, until the fleet has reached its desired state. Returns the exit code, which is 1 if
    that takes too long or is impossible."""
    start, fleet = SYSTEM_CLOCK.monotonic(), desired.fleet
    deadline, last_line = start + wait_s, start
    shown, trouble = 0, tuple[str, ...]()
    while True:
        events = [recent for recent in ledger.history() if recent.at >= begun]
        for event in events[shown:]:
            sys.stderr.write(f"kvferry: {event_text(event)}\n")
        last_line = SYSTEM_CLOCK.monotonic() if len(events) > shown else last_line
        shown = len(events)
        seen = ledger.current_status()
        if SYSTEM_CLOCK.monotonic() - last_line >= line_interval_s:
            last_line = SYSTEM_CLOCK.monotonic()
            names = [member.name for member in (seen.members if seen else ()) if member.phase == "starting"]
            sys.stderr.write(f"kvferry: {last_line - start:.0f} s: {waiting_text(names)}\n")
        if seen is not None and seen.number >= desired.number:
            if seen.settled:
                sys.stdout.write(f"{fleet.name} is up: {seen.url}\n")
                return 0
            if seen.passing and seen.trouble != trouble:
                sys.stderr.write(f"kvferry: waiting: {seen.trouble[0]}\n")
            trouble = seen.trouble
            if trouble and not seen.passing and not any(recent.phase == "starting" for recent in seen.members):
                _complain(trouble)
                return 1
        if (holder := ledger.controller) is not None and holder.hangs:
            require_controller(ledger, fleet.name)
        if not ledger.has_controller:
            if is_ending(ledger):
                raise ConfigError(f"{fleet.name} has been deleted meanwhile")
            raise ConfigError(f"the controller of {fleet.name} has ended: {controller_exit_reason(ledger)}")
        if SYSTEM_CLOCK.monotonic() > deadline:
            _complain([f"{fleet.name} is not as it is to be after {wait_s:g} s; it goes on"])
            return 1
        time.sleep(POLL_INTERVAL_S)


def waiting_text(starting: Sequence[str]) -> str:
    """The members for which the command waits. Even if all of them are up, the fleet may not have reached its desired
    state."""
    if not starting:
        return "waiting for the fleet's controller"
    more = f" and {len(starting) - 4} more" if len(starting) > 4 else ""
    return f"waiting for {', '.join(starting[:4])}{more} to start"


def _complain(lines: Sequence[str]) -> None:
    for line in lines:
        sys.stderr.write(f"kvferry: error: {line}\n")


def _see_end(ledger: Ledger, name: str, wait_s: float) -> int:
    """Wait for the end of a fleet, which another process may be deleting at the same time."""
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    require_controller(ledger, name)
    while ledger.exists and ledger.has_controller:
        if SYSTEM_CLOCK.monotonic() >= deadline:
            sys.stderr.write(f"kvferry: {name} is ending; `kvferry fleet status {name}` shows what is left\n")
            return 1 if wait_s else 0
        time.sleep(POLL_INTERVAL_S)
        if (holder := ledger.controller) is not None and holder.hangs:
            require_controller(ledger, name)
    if ledger.exists and not ledger.remove(running_path(ledger)):
        raise ConfigError(f"{name} was applied again while it ended")
    sys.stdout.write(f"{name}: ended\n")
    return 0


COMMANDS: tuple[Callable[..., int], ...] = (apply, status, scale, roll, rollback, pause, resume, delete, control)
