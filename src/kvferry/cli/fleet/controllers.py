"""The controller of a fleet: run in the foreground, or started in the background where a fleet has none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter

from kvferry.cli import completion
from kvferry.cli.serving.attended import controlling, exit_now
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token, users_token
from kvferry.core.runtime.process_exit import ERROR_PREFIX
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.options import unknown_key
from kvferry.fleet.control.backend import BackendContext, FleetBackend, backend_class
from kvferry.fleet.control.controller import Detached, LeadershipLost, ShutdownRequested
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.display import Display, PlainDisplay
from kvferry.fleet.leftovers import remove_leftovers
from kvferry.fleet.places import fleet_names, ledger_of, running_folder
from kvferry.fleet.processes.process import PROGRAM
from kvferry.fleet.processes.recipe import recipe_of
from kvferry.fleet.spec.fleet_settings import grace_of
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.models.digest_cache import DigestCache
from kvferry.observe.logs import TEXT, set_up_logging

POLL_INTERVAL_S = 0.2
_BEGIN_S = 20.0
"""Maximum seconds until a started controller leads."""
_KILLED_S = 10.0
"""Seconds to wait for a killed controller to end."""
_LOG = "controller.log"
_MAX_LOG_BYTES = 16 * 2**20

Fleet = Annotated[str, Parameter(help="Name of the fleet, as in its spec.", completer=completion.fleets)]


def control(
    name: Fleet,
    *,
    wait: Annotated[bool, Parameter(help="If a controller runs already, wait until it has ended.")] = True,
) -> int:
    """Run a fleet's controller in the foreground. `apply` runs it in the background; SIGTERM ends it, and the fleet
    keeps running. A second controller waits until the first has ended."""
    set_up_logging(TEXT, "controller")
    DigestCache()  # logs problems with it once, for all processes
    remove_leftovers()
    ledger = existing_ledger(name)
    with suppress(OSError):  # the folder is gone, and so are the paths relative to it
        os.chdir(ledger.desired_state().directory or ".")
    return run_async(reconcile(ledger, wait_for_leadership=wait))


async def reconcile(
    ledger: Ledger, *, wait_for_leadership: bool, follows_file: bool = False, display: Display | None = None
) -> int:
    """Run a fleet's controller until a signal. If its heartbeat was late, another controller may have taken over: the
    process then starts again, and waits for the other controller. `wait_for_leadership`, `follows_file`: as in
    `Controller`."""
    fleet, display = ledger.desired_state().fleet, display or PlainDisplay()
    backend = make_backend(running_folder(ledger), fleet, display)
    grace_s = grace_of(fleet)

    def on_signal(number: int) -> None:
        controller.end(Detached())

    async with controlling(
        ledger,
        backend,
        display,
        on_signal,
        wait_for_leadership=wait_for_leadership,
        follows_file=follows_file,
        grace_s=grace_s,
    ) as controller:
        end = await controller.run()
        if isinstance(end, LeadershipLost):
            _restart()
        if isinstance(end, ShutdownRequested):
            await controller.shut_down()
    display.close()
    if backend.hangs:
        exit_now(0)
    return 0


def _restart() -> NoReturn:
    """Replace this process by a new start of its program. Its open connections and threads are dropped: a connection to
    a cluster that does not answer can neither be closed in time nor used again."""
    os.execv(PROGRAM[0], [*PROGRAM, *sys.argv[1:]])


def existing_ledger(name: str) -> Ledger:
    """The ledger of the fleet with this name. Raises `ConfigError` if there is none."""
    names = fleet_names()
    if name not in names:  # also refuses names that are paths
        if not names:
            raise ConfigError(f"there is no fleet {name}, nor any other; `kvferry fleet apply SPEC` makes one")
        raise ConfigError(unknown_key(repr(name[:40]), name, names, "fleet"))
    return ledger_of(name)


def make_backend(folder: Path, fleet: DesiredFleet, display: Display | None = None) -> FleetBackend:
    """The fleet's backend, not opened yet. Raises `ConfigError` if it cannot run the fleet."""
    token = _token()
    make_recipe = partial(recipe_of, token=token)
    context = BackendContext(folder, make_recipe, display or PlainDisplay(), token=token)
    backend = backend_class(fleet.backend.kind)(context)
    backend.use(fleet)
    return backend


def _token() -> str:
    """The token that all controllers of a fleet share: a new one would lock out the next controller."""
    token = shared_token() or users_token()
    if not token:
        raise ConfigError("no token can be kept for this user; set KVFERRY_AUTH_TOKEN")
    return token


def require_controller(ledger: Ledger, name: str) -> None:
    """Start a controller in the background unless the fleet has one, or is deleted. A controller that hangs is killed:
    the members keep running, and the next controller adopts them."""
    _end_hung(ledger, name)
    if ledger.has_controller or not ledger.exists:
        return
    path = ledger.folder / _LOG
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
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
            if not ledger.exists or (process.returncode == 0 and is_ending(ledger)):
                return  # the fleet was deleted, and ended before the next check
            raise ConfigError(f"the controller of {name} ended at once: {controller_exit_reason(ledger)}")
        if SYSTEM_CLOCK.monotonic() > deadline:
            raise ConfigError(f"the controller of {name} has not started; see {path}")
        time.sleep(POLL_INTERVAL_S)


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
            raise ConfigError(f"{who} hangs, and does not end when it is killed")
        time.sleep(POLL_INTERVAL_S)


def last_error(ledger: Ledger) -> str:
    """The last controller's final log line, if it was an error."""
    try:
        last = (ledger.folder / _LOG).read_text(errors="replace").strip().splitlines()[-1:]
    except OSError:
        return ""
    return next((line.removeprefix(ERROR_PREFIX) for line in last if line.startswith(ERROR_PREFIX)), "")


def controller_exit_reason(ledger: Ledger) -> str:
    """The last controller's final error, or where to look for it."""
    return last_error(ledger) or f"see {ledger.folder / _LOG}"


def is_ending(ledger: Ledger) -> bool:
    """True if the fleet is being deleted, or has been."""
    try:
        return not ledger.exists or ledger.desired_state().deleted
    except ConfigError:  # the ledger cannot be read, so a controller could not end its members
        return False
