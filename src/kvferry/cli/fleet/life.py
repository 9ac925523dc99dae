"""`kvferry fleet apply` and what follows it: a fleet from a spec, changed while it serves.

A controller in the background maintains it. These commands record the desired state and show the actual one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvferry.cli.fleet_settings import grace_of, local_recipe
from kvferry.cli.serve import serve
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token, users_token
from kvferry.core.settings.bounds import SECONDS_OR_ZERO
from kvferry.core.settings.options import read_value, unknown_key
from kvferry.fleet.backends.local.member import ERROR_PREFIX
from kvferry.fleet.control.backend import BackendContext, FleetBackend, backend_class
from kvferry.fleet.control.controller import Controller, End, EndAsked, LetGo, Superseded
from kvferry.fleet.control.facts import Drain, MemberStatus, Observed, Phase, Start, Step, StopMember, SwitchRole
from kvferry.fleet.control.front import Front
from kvferry.fleet.control.ledger import Event, Ledger, Wanted
from kvferry.fleet.control.rehearsal import rehearse
from kvferry.fleet.control.spec import Number, WantedFleet, check_fleet, read_fleet, what_cannot_roll
from kvferry.fleet.display import PlainDisplay
from kvferry.fleet.leftovers import remove_leftovers
from kvferry.fleet.places import fleet_names, ledger_of, running_folder, running_path
from kvferry.fleet.process import PROGRAM
from kvferry.models.catalog import resolve
from kvferry.models.digest_cache import DigestCache
from kvferry.observe.logs import TEXT, set_up_logging

_LOOK_S = 0.2
_BEGIN_S = 20.0
"""How long a controller may take to begin."""
_KILLED_S = 10.0
"""Seconds to wait for a killed controller to end."""
_LOG = "controller.log"
_MOST_LOG_BYTES = 16 * 2**20

Fleet = Annotated[str, Parameter(help="Name of the fleet, as in its spec.")]
Wait = Annotated[
    float, Parameter(help="Seconds to wait until the fleet is as it is to be; 0: only write down what is wanted.")
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

    Members go on when this command ends. A controller in the background replaces those that die; `kvferry fleet status`
    shows them.
    """
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    fleet = read_fleet(spec)
    ledger = ledger_of(fleet.name)
    if fleet.backend.kind == "local":
        resolve(fleet.model)
    _require_same_place(ledger, fleet)
    _backend(running_path(ledger), fleet)
    if dry_run:
        return _rehearse(ledger, fleet)
    if (what := what_cannot_roll(fleet)) and fleet.scale is None:
        why = f"{what}: with max = count and roll.unavailable = 0, no roll can replace anything"
        sys.stderr.write(f"kvferry: {why}; raise one of max and roll.unavailable to be able to change settings\n")
    _wait_for_end(ledger, wait_s)
    return _pursue(ledger, ledger.want(fleet), wait_s)


def status(
    name: Annotated[str | None, Parameter(help="Name of the fleet. Default: all.")] = None,
    *,
    history: Annotated[bool, Parameter(help="Show each step that was taken, and why.", negative=())] = False,
    json: Annotated[bool, Parameter(help="Print JSON.", negative=())] = False,
) -> int:
    """Show a fleet: per role how many are wanted, ready, of the current revision and draining, and what failed."""
    names = fleet_names() if name is None else [name]
    if not names:
        sys.stderr.write("kvferry: there are no fleets; `kvferry fleet apply SPEC` makes one\n")
    for one in names:
        ledger = _existing(one)
        if json:
            shown = {"wanted": ledger.wanted(), "status": ledger.status(), "has_controller": ledger.has_controller}
            events = {"history": list(ledger.history())} if history else {}
            sys.stdout.buffer.write(msgspec.json.encode({**shown, **events}) + b"\n")
            continue
        for line in _history(ledger) if history else _overview(one, ledger):
            sys.stdout.write(line + "\n")
    return 0


def scale(
    name: Fleet,
    counts: Annotated[tuple[str, ...], Parameter(help="How many of what: prefill=3 decode=2; unit=2 in replica mode.")],
    /,
    *,
    wait_s: Wait = 600.0,
) -> int:
    """Change how many instances of a role, or units, there are: `kvferry fleet scale chat prefill=3 decode=2`."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)

    def scaled(wanted: Wanted) -> WantedFleet:
        fleet = wanted.fleet
        if fleet.scale is not None and not fleet.scale.recommend:
            why = "has a table [scale], which decides about its counts; change min and max in its spec"
            raise ConfigError(f"{name} {why}")
        for one in counts:
            what, _, number = one.partition("=")
            if not (number.isascii() and number.isdecimal()):
                raise ConfigError(f"{one!r} is not a role and a number; write it as prefill=3")
            fleet = _scaled(fleet, what, read_value(what, number, Number))
        return check_fleet(fleet)

    return _change(name, scaled, wait_s)


def roll(name: Fleet, *, wait_s: Wait = 600.0) -> int:
    """Replace every instance and router by a new one of the same settings, a few at a time."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    stamp = f"{SYSTEM_CLOCK.wall():.3f}"
    return _change(name, lambda wanted: msgspec.structs.replace(wanted.fleet, stamp=stamp), wait_s)


def rollback(
    name: Fleet,
    *,
    to: Annotated[str | None, Parameter(help="Revision, as `status` shows it. Default: the one before.")] = None,
    wait_s: Wait = 600.0,
) -> int:
    """Return a fleet to its settings before its last change of revision, or to those of revision --to."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)

    def before(wanted: Wanted) -> WantedFleet:
        earlier = {one.revision: one for one in wanted.earlier}
        if not earlier:
            raise ConfigError(f"{name} has had no other revision that could be gone back to")
        revision = to or next(iter(earlier))
        if revision not in earlier:
            raise ConfigError(unknown_key(f"revision {revision}", revision, earlier))
        return earlier[revision]

    return _change(name, before, wait_s)


def pause(name: Fleet) -> int:
    """Stop starting and replacing members, even those that die, until `kvferry fleet resume`."""
    return _set_pause(name, pause=True)


def resume(name: Fleet, *, wait_s: Wait = 600.0) -> int:
    """Continue after `kvferry fleet pause`."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    return _set_pause(name, pause=False, wait_s=wait_s)


def delete(name: Fleet, *, wait_s: Wait = 600.0) -> int:
    """End a fleet: its routers first, then its instances, each once its running requests have ended."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    ledger = _existing(name)
    ledger.delete()
    try:
        return _see_end(ledger, name, wait_s)
    except KeyboardInterrupt:
        sys.stderr.write(f"kvferry: {name} goes on ending without being watched\n")
        return 130


def _see_end(ledger: Ledger, name: str, wait_s: float) -> int:
    """Whoever deletes a fleet at the same time may be the one that sees it end."""
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    _require_controller(ledger, name)
    while ledger.exists and ledger.has_controller:
        if SYSTEM_CLOCK.monotonic() >= deadline:
            sys.stderr.write(f"kvferry: {name} is ending; `kvferry fleet status {name}` shows what is left\n")
            return 1 if wait_s else 0
        time.sleep(_LOOK_S)
        if (holder := ledger.controller) is not None and holder.hangs:
            _require_controller(ledger, name)
    if ledger.exists and not ledger.forget(running_path(ledger)):
        raise ConfigError(f"{name} was applied again while it ended")
    sys.stdout.write(f"{name}: ended\n")
    return 0


def control(
    name: Fleet,
    *,
    wait: Annotated[bool, Parameter(help="Wait until a controller that looks after it already has ended.")] = True,
) -> int:
    """Run a fleet's controller in the foreground. `apply` runs it in the background; SIGTERM ends it, and the fleet
    keeps running. A second controller waits until the first has ended."""
    set_up_logging(TEXT, "controller")
    DigestCache()
    remove_leftovers()
    return asyncio.run(_control(_existing(name), waits=wait))


async def _control(ledger: Ledger, *, waits: bool) -> int:
    """Until it is told to end. One that was not heard for so long that another may act begins anew, and waits."""
    while isinstance(await _look_after(ledger, waits=waits), Superseded):
        waits = True
    return 0


async def _look_after(ledger: Ledger, *, waits: bool) -> End:
    fleet, display = ledger.wanted().fleet, PlainDisplay()
    backend = _backend(running_folder(ledger), fleet)
    async with Front(backend.context.token) as front:
        controller = Controller(
            ledger, backend, front, display, SYSTEM_CLOCK, waits=waits, grace_s=grace_of(fleet, serve)
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, controller.end, LetGo())
        try:
            end = await controller.run()
            if isinstance(end, EndAsked):
                await controller.bring_down()
            return end
        finally:
            await backend.close()
            controller.close()


# What is wanted.


def _existing(name: str) -> Ledger:
    names = fleet_names()
    if name not in names:  # which is also the answer to a name that is a path
        if not names:
            raise ConfigError(f"there is no fleet {name}, nor any other; `kvferry fleet apply SPEC` makes one")
        raise ConfigError(unknown_key(f"fleet {name}", name, names))
    return ledger_of(name)


def _token() -> str:
    """The token that all controllers of a fleet share: a new one would lock out the next controller."""
    token = shared_token() or users_token()
    if not token:
        raise ConfigError("no token can be kept for this user; set KVFERRY_AUTH_TOKEN")
    return token


def _backend(folder: Path, fleet: WantedFleet) -> FleetBackend:
    """The fleet's backend, not opened yet. Raises `ConfigError` if it cannot run the fleet."""
    token = _token()
    make_recipe = partial(local_recipe, token=token, command=serve)
    context = BackendContext(folder, make_recipe, PlainDisplay(), token=token)
    backend = backend_class(fleet.backend.kind)(context)
    backend.use(fleet)
    return backend


def _scaled(fleet: WantedFleet, what: str, number: int) -> WantedFleet:
    if fleet.unit is not None:
        if what != "unit":
            raise ConfigError(f"{fleet.name} is in replica mode, where units are scaled: unit={number}")
        return msgspec.structs.replace(fleet, unit=msgspec.structs.replace(fleet.unit, count=number))
    role = next((one for name, one in fleet.role.items() if name == what), None)
    if role is None:
        raise ConfigError(unknown_key(what, what, fleet.role))
    return msgspec.structs.replace(fleet, role={**fleet.role, what: msgspec.structs.replace(role, count=number)})


def _set_pause(name: str, *, pause: bool, wait_s: float = 0.0) -> int:
    def set_pause(wanted: Wanted) -> WantedFleet:
        return msgspec.structs.replace(wanted.fleet, roll=msgspec.structs.replace(wanted.fleet.roll, pause=pause))

    return _change(name, set_pause, wait_s)


# What becomes of it.


def _change(name: str, how: Callable[[Wanted], WantedFleet], wait_s: float) -> int:
    ledger = _existing(name)
    return _pursue(ledger, ledger.change(how), wait_s)


def _pursue(ledger: Ledger, wanted: Wanted, wait_s: float) -> int:
    """Have a controller carry it out."""
    name = wanted.fleet.name
    try:
        _require_controller(ledger, name)
        return _follow(ledger, wanted.fleet, wanted.number, wait_s) if wait_s else 0
    except KeyboardInterrupt:
        sys.stderr.write(f"kvferry: {name} goes on without being watched: kvferry fleet status {name}\n")
        return 130


def _require_same_place(ledger: Ledger, fleet: WantedFleet) -> None:
    """A fleet stays where it is: elsewhere, no controller would find its members. Raises `ConfigError`."""
    try:
        before = ledger.wanted()
    except ConfigError:  # there is none, or nobody can read what it was to be
        return
    for what, was, is_to_be in (
        ("kind", before.fleet.backend.kind, fleet.backend.kind),
        ("kubernetes.namespace", _namespace(before.fleet), _namespace(fleet)),
    ):
        if was != is_to_be and not before.deleted:
            raise ConfigError(
                f"backend.{what} cannot be changed from {was} to {is_to_be}: `kvferry fleet delete {fleet.name}` first,"
                " or give one of the two fleets another name"
            )


def _namespace(fleet: WantedFleet) -> str:
    return "" if fleet.backend.kubernetes is None else fleet.backend.kubernetes.namespace


def _wait_for_end(ledger: Ledger, wait_s: float) -> None:
    """A fleet that is being deleted must end before it is created again."""
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    while ledger.has_controller and _is_ending(ledger):
        if SYSTEM_CLOCK.monotonic() >= deadline:
            raise ConfigError(f"{ledger.folder.name} is ending; apply its spec once it has ended")
        time.sleep(_LOOK_S)


def _is_ending(ledger: Ledger) -> bool:
    try:
        return not ledger.exists or ledger.wanted().deleted
    except ConfigError:  # it cannot be read, so no controller would end its members
        return False


def _last_error(ledger: Ledger) -> str:
    """The last controller's final log line, if it was an error."""
    try:
        last = (ledger.folder / _LOG).read_text(errors="replace").strip().splitlines()[-1:]
    except OSError:
        return ""
    return next((one.removeprefix(ERROR_PREFIX) for one in last if one.startswith(ERROR_PREFIX)), "")


def _require_controller(ledger: Ledger, name: str) -> None:
    """Start a controller in the background unless the fleet has one. One that hangs is killed: the members keep
    running, and the next controller finds them."""
    _end_hung(ledger, name)
    if ledger.has_controller:
        return
    path = ledger.folder / _LOG
    if path.exists() and path.stat().st_size > _MOST_LOG_BYTES:
        path.replace(path.with_suffix(".log.old"))
    with open(path, "ab", opener=_private) as log:
        process = subprocess.Popen(
            [*PROGRAM, "fleet", "control", name, "--no-wait"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = SYSTEM_CLOCK.monotonic() + _BEGIN_S
    while not ledger.has_controller:
        if process.poll() is not None and not ledger.has_controller:
            raise ConfigError(f"the controller of {name} ended at once: {_last_error(ledger) or f'see {path}'}")
        if SYSTEM_CLOCK.monotonic() > deadline:
            raise ConfigError(f"the controller of {name} does not begin; see {path}")
        time.sleep(_LOOK_S)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _end_hung(ledger: Ledger, name: str) -> None:
    holder = ledger.controller
    if holder is None or not holder.hangs:
        return
    who = f"the controller of {name} (process {holder.pid})"
    sys.stderr.write(f"kvferry: {who} has hung for {holder.silent_s:.0f} s; it is ended, and another one takes over\n")
    holder.kill()
    deadline = SYSTEM_CLOCK.monotonic() + _KILLED_S
    while ledger.has_controller:
        if SYSTEM_CLOCK.monotonic() > deadline:
            raise ConfigError(f"{who} hangs, and cannot be ended")
        time.sleep(_LOOK_S)


def _follow(ledger: Ledger, fleet: WantedFleet, number: int, wait_s: float) -> int:
    """Show progress until the fleet has reached its desired state; exit code 1 if that takes too long or is
    impossible."""
    deadline, begun = SYSTEM_CLOCK.monotonic() + wait_s, SYSTEM_CLOCK.wall()
    shown = 0
    while True:
        events = [one for one in ledger.history() if one.at >= begun]
        for event in events[shown:]:
            sys.stderr.write(f"kvferry: {_told(event)}\n")
        shown = len(events)
        seen = ledger.status()
        if seen is not None and seen.number >= number:
            if seen.settled:
                sys.stdout.write(f"{fleet.name} is up: {seen.url}\n")
                return 0
            if seen.trouble and not any(one.phase == "starting" for one in seen.members):
                _complain(seen.trouble)
                return 1
        if (holder := ledger.controller) is not None and holder.hangs:
            _require_controller(ledger, fleet.name)
        if not ledger.has_controller:
            if _is_ending(ledger):
                raise ConfigError(f"{fleet.name} has been deleted meanwhile")
            why = _last_error(ledger) or f"see {ledger.folder / _LOG}"
            raise ConfigError(f"the controller of {fleet.name} has ended: {why}")
        if SYSTEM_CLOCK.monotonic() > deadline:
            _complain([f"{fleet.name} is not as it is to be after {wait_s:g} s; it goes on"])
            return 1
        time.sleep(_LOOK_S)


def _complain(lines: Sequence[str]) -> None:
    for line in lines:
        sys.stderr.write(f"kvferry: error: {line}\n")


def _rehearse(ledger: Ledger, fleet: WantedFleet) -> int:
    seen = ledger.status() if ledger.has_controller else None
    members = [_observed(one) for one in ([] if seen is None else seen.members) if one.role != "router"]
    steps = rehearse(fleet, members)
    for step in steps:
        sys.stdout.write(f"{_step(step)}\n")
    if not steps:
        sys.stdout.write("nothing would change\n")
    return 0


def _observed(member: MemberStatus) -> Observed:
    return Observed(member.name, member.role, member.revision, Phase(member.phase), -member.for_s, member.unit)


def _step(step: Step) -> str:
    match step:
        case Start(name, role, revision, why):
            return f"+ start {name} ({role}, revision {revision}): {why}"
        case Drain(name, why):
            return f"- drain {name}: {why}"
        case StopMember(name, why):
            return f"- stop {name}: {why}"
        case SwitchRole(name, role, why):
            return f"~ {name} becomes {role}: {why}"


def _told(event: Event) -> str:
    return " ".join(filter(None, (event.what, event.name))) + (f": {event.why}" if event.why else "")


def _history(ledger: Ledger) -> list[str]:
    return [f"{_when(one.at)} {_told(one)}" for one in ledger.history()]


def _when(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # the file was changed from outside
        return f"{at:g}"


def _overview(name: str, ledger: Ledger) -> list[str]:
    wanted, seen = ledger.wanted(), ledger.status()
    fleet = wanted.fleet
    head = f"{name}  {fleet.model}  {fleet.mode}  revision {fleet.revision}"
    lines = [head + ("  paused" if fleet.roll.pause else "") + ("  ending" if wanted.deleted else "")]
    if not ledger.has_controller:
        then = f"{'delete' if wanted.deleted else 'resume'} {name}"
        why = f" ({last})" if (last := _last_error(ledger)) else ""
        lines.append(f"  no controller looks after it{why}; `kvferry fleet {then}` starts one")
    elif (holder := ledger.controller) is not None and holder.hangs:
        what = f"its controller (process {holder.pid}) has hung for {holder.silent_s:.0f} s"
        lines.append(f"  {what}; `kvferry fleet resume {name}` replaces it")
    if seen is None:
        return lines
    if seen.url:
        lines.append(f"  {seen.url}")
    if seen.decided:
        lines.append(f"  {'would be ' if fleet.scale and fleet.scale.recommend else ''}scaled: {seen.decided}")
    lines.append(f"  {'role':<9} {'wanted':>6} {'ready':>6} {'current':>8} {'starting':>9} {'draining':>9}")
    for role, one in seen.roles.items():
        figures = f"{one.desired:>6} {one.ready:>6} {one.updated:>8} {one.starting:>9} {one.draining:>9}"
        lines.append(f"  {role:<9} {figures}" + (f"  failed: {one.failed}" if one.failed else ""))
    for member in seen.members:
        detail = f"  {member.detail}" if member.detail else ""
        unit = f"  {member.unit}" if member.unit else ""
        lines.append(
            f"    {member.name:<14} {member.role:<8} {member.phase:<9} {member.revision}  {member.url}{unit}{detail}"
        )
    return lines


COMMANDS: tuple[Callable[..., int], ...] = (apply, status, scale, roll, rollback, pause, resume, delete, control)
