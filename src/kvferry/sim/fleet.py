"""A simulated fleet: the real controller, its loop, its ledger and its orders to the routers, over simulated processes.

`SimBackend` starts and stops simulated instances and routers; they outlive the controller, whose process may crash, and
the next one takes them up. The ledger is a real folder: what is in it has no time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.fleet.control.backend import FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.control.controller import Controller, EndAsked
from kvferry.fleet.control.front import Front
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.spec import MemberRole, WantedFleet
from kvferry.router.config import RouterConfig
from kvferry.sim.engine import SimInstance
from kvferry.sim.loop import SimProcess
from kvferry.sim.network import SimHost
from kvferry.sim.router import SimRouter
from kvferry.sim.world import PORT, TOKEN, World, WorldSpec

_LOOKS_EVERY_S = 0.05
_COMES_UP_S = 120.0
_ROUTER_STARTS_S = 1.0
_GRACE_S = 30.0


@dataclass
class _Started:
    """A member that was started and not stopped. `what` runs it."""

    spec: MemberSpec
    what: SimInstance | SimRouter
    is_stopping: bool = False

    def member(self) -> Member:
        """What the backend reports of it."""
        what, spec = self.what, self.spec
        if not what.process.is_alive:
            return self._in(MemberState.ENDED)
        serves = what.front is not None if isinstance(what, SimInstance) else what.router is not None
        if not serves:
            return self._in(MemberState.STARTING)
        health = what.url if spec.role == "router" else ""
        return replace(self._in(MemberState.SERVING), url=what.url, health_url=health)

    def _in(self, state: MemberState) -> Member:
        spec = self.spec
        reason = "was killed" if state is MemberState.ENDED else ""
        return Member(spec.name, spec.role, spec.revision, state, unit=spec.unit, reason=reason)


class SimBackend(FleetBackend):
    """The members of a `FleetWorld`, for one controller."""

    num_routers = 1

    def __init__(self, world: FleetWorld) -> None:
        self.changed = asyncio.Event()
        self._world = world

    def use(self, fleet: WantedFleet) -> None:
        """Does nothing: all fleets can be run."""

    async def open(self) -> None:
        """Does nothing: the world has what an earlier controller left."""

    def members(self) -> Sequence[Member]:
        """The members, and the state each is in now."""
        return [one.member() for one in self._world.started.values()]

    async def start(self, member: MemberSpec) -> None:
        """Start a new process, on the machine that has the member's name."""
        self._world.start_member(member)
        self.changed.set()

    async def stop(self, name: str, grace_s: float) -> None:
        """Stop the member as SIGTERM does, and after `grace_s` as SIGKILL does."""
        started = self._world.started.get(name)
        if started is None:
            return
        loop = asyncio.get_running_loop()
        until, process = loop.time() + grace_s, started.what.process
        if process.is_alive and not started.is_stopping:
            started.is_stopping = True
            self._world.changes(started)
            started.what.stop()
        while process.is_alive and process.tasks() and loop.time() < until:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(_LOOKS_EVERY_S)
        if self._world.started.get(name) is started:
            self._world.forget_member(name)
            self.changed.set()

    async def assign(self, name: str, role: MemberRole) -> None:
        """Note its role."""
        started = self._world.started.get(name)
        if started is not None:
            self._world.changes(started, role)
            self.changed.set()

    async def close(self) -> None:
        """Does nothing: members outlive it."""


class FleetWorld(World):
    """A deployment that a controller brings up and looks after. `router` of the spec are settings of its routers."""

    def __init__(self, spec: WorldSpec, fleet: WantedFleet, seed: int, *, keep_log: bool = False) -> None:
        none = replace(spec, num_prefill=0, num_decode=0, num_both=0, num_routers=0, num_units=0)
        super().__init__(none, seed, keep_log=keep_log)
        self.started: dict[str, _Started] = {}
        self.before_change: Callable[[SimInstance], None] = lambda _: None
        """Called with an instance before it stops or has another role."""
        self._fleet = fleet
        self._last: dict[str, SimInstance | SimRouter] = {}
        self.ledger: Ledger
        self.controller_process: SimProcess
        self._num_controllers = 0

    @contextmanager
    def running(self) -> Iterator[World]:
        """Run the world while the body runs; the ledger is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="kvferry-sim-") as folder:
            self.ledger = Ledger(Path(folder) / "fleet")
            self.ledger.want(self._fleet)
            with super().running():
                yield self

    def _start(self) -> None:
        self.start_controller()
        self.run_until(lambda: self.is_settled, _COMES_UP_S + self.spec.instance.start_s)
        super()._start()

    # The controller.

    def start_controller(self) -> None:
        """Start a new controller. The last one has ended, or it waits until it has."""
        self._num_controllers += 1
        host = self.network.host(f"controller{self._num_controllers}")
        self.controller_process = process = host.process(host.address)
        loop = process.thread("controller")
        loop.call_soon(lambda: loop.create_task(self._control(process)))

    async def _control(self, process: SimProcess) -> None:
        backend, clock = SimBackend(self), self.simulation
        async with Front(TOKEN) as front:
            controller = Controller(self.ledger, backend, front, _Silent(), clock, grace_s=_GRACE_S)
            process.on_end[controller] = controller.close  # the kernel's, when a process ends
            try:
                if isinstance(await controller.run(), EndAsked):
                    await controller.bring_down()
            finally:
                process.on_end.pop(controller, None)
                controller.close()

    @property
    def is_settled(self) -> bool:
        """Whether the controller has seen all that is wanted now."""
        seen = self.ledger.status()
        return seen is not None and seen.settled and seen.number == self.ledger.wanted().number

    def want(self, fleet: WantedFleet) -> None:
        """Apply another spec."""
        self.ledger.want(fleet)
        self.simulation.note("another fleet is wanted")

    # Its members.

    def hosts(self) -> list[SimHost]:
        """The hosts of all members, and the controller's."""
        return [*super().hosts(), self.controller_process.host]

    def open_routers(self) -> list[SimRouter]:
        """Routers that are ready, as a load balancer in front of them asks, and are not to end; else any that was."""
        ready = [
            one.what
            for one in self.started.values()
            if isinstance(one.what, SimRouter) and one.what.is_ready and not one.is_stopping
        ]
        return ready or [one for one in self._last.values() if isinstance(one, SimRouter)]

    def start_member(self, spec: MemberSpec) -> None:
        """Start a member, for the backend. Raises `NotStarted`."""
        if spec.name in self.started:
            raise NotStarted(f"{spec.name} is here")
        self.simulation.note(f"{spec.name} is started")
        what = self._last.get(spec.name)
        if what is not None:
            if isinstance(what, SimInstance) and spec.role != "router":
                what.role = spec.role  # it may have changed it when it ran last
            what.start_again()
        elif spec.role == "router":
            config = RouterConfig(declared=True, **self.spec.router)
            after_s = min(_ROUTER_STARTS_S, self.spec.instance.start_s)
            what = SimRouter(self.network.host(spec.name), PORT, config, TOKEN, after_s=after_s)
        else:
            process, kind = self.network.host(spec.name).process(spec.name), self.spec.instance_of(spec.role)
            what = SimInstance(spec.name, spec.role, kind, process, PORT, TOKEN, self.storage)
            what.start(kind.start_s)
        self.started[spec.name] = _Started(spec, what)
        self._last[spec.name] = what
        if isinstance(what, SimRouter):
            self.routers.append(what)
        else:
            self.instances.append(what)

    def changes(self, started: _Started, role: MemberRole | None = None) -> None:
        """A member is about to be stopped, or to have another role, for the backend."""
        if isinstance(started.what, SimInstance):
            self.before_change(started.what)
            if role is not None and role != "router":
                started.spec, started.what.role = replace(started.spec, role=role), role

    def forget_member(self, name: str) -> None:
        """End a member's process if it still runs, for the backend, and forget the member."""
        what = self.started.pop(name).what
        what.crash()
        if isinstance(what, SimInstance):
            self.instances.remove(what)
        else:
            self.routers.remove(what)

    # The end.

    def end(self) -> bool:
        """The fleet is deleted, and its controller ends everything; returns whether all of it ended."""
        members = [one.what.process for one in self.started.values()]
        self.ledger.delete()
        self.run_until(lambda: not (self.started or self.controller_process.tasks()), _COMES_UP_S)
        return super().end() and not any(one.tasks() for one in members if one.is_alive) and not self.started


class _Silent:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None
