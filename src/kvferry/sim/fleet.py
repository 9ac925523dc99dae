"""A simulated fleet: the real controller, its loop, its ledger and its declarations to the routers, over simulated
processes.

`SimBackend` starts and stops simulated instances and routers; they outlive the controller, whose process may crash, and
the next one adopts them. The ledger is a real folder: its use takes no virtual time.

There may be several controllers, each on its own machine and with its own ledger. One of them is the leader, as long as
it holds the lease (`SimLeadership`), which is on the host `cluster`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.fleet.control.backend import FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.control.controller import Controller, LeadershipLost, ShutdownRequested
from kvferry.fleet.control.leadership import TAKEN_S, LeadershipUnknown, TimedLeadership
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.router_client import RouterClient, RouterInstanceView
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole
from kvferry.router.config import RouterConfig
from kvferry.sim.engine import SimInstance
from kvferry.sim.loop import SimProcess
from kvferry.sim.network import SimHost
from kvferry.sim.router import SimRouter
from kvferry.sim.world import PORT, TOKEN, World, WorldSpec

LEASE_HOST = "cluster"


@dataclass
class StartedMember:
    """A member that was started and not stopped. `what` runs it."""

    spec: MemberSpec
    what: SimInstance | SimRouter
    is_stopping: bool = False

    def member(self) -> Member:
        """The member as the backend reports it."""
        what, spec = self.what, self.spec
        if not what.process.is_alive:
            return self._with_state(MemberState.ENDED)
        serves = what.engine_client is not None if isinstance(what, SimInstance) else what.router is not None
        if not serves:
            return self._with_state(MemberState.STARTING)
        health = what.url if spec.role == "router" else ""
        return replace(self._with_state(MemberState.SERVING), url=what.url, health_url=health)

    def _with_state(self, state: MemberState) -> Member:
        spec = self.spec
        reason = "was killed" if state is MemberState.ENDED else ""
        return Member(spec.name, spec.role, spec.revision, state, unit=spec.unit, reason=reason)


class SimLeadership(TimedLeadership):
    """The leadership of a `FleetWorld`'s fleet, for one of its controllers."""

    lease_timeout_s = 2.0
    """Max seconds to wait for the host of the lease."""

    def __init__(self, world: FleetWorld, me: SimProcess) -> None:
        super().__init__(world.simulation.monotonic)
        self._world, self._own_process = world, me
        self._seen = (-1, 0.0)
        """Number of renewals of the lease, and the time since which it is unchanged."""

    async def try_acquire(self) -> bool:
        """Take the lease if its holder has not renewed it for `TAKEN_S`."""
        begun = self._clock()
        await self._reach()
        world = self._world
        if world.lease_holder not in ("", self._own_process.name):
            self.holder = world.lease_holder
            if self._seen[0] != world.num_renewals:
                self._seen = (world.num_renewals, self._clock())
            if self._clock() - self._seen[1] < TAKEN_S:
                return False
        self._hold(begun)
        return True

    async def renew(self) -> None:
        """Renew the lease, unless another controller has taken it."""
        begun = self._clock()
        await self._reach()
        if self._world.lease_holder == self._own_process.name:
            self._hold(begun)
        else:
            self._lost()

    async def release(self) -> None:
        """Release the lease, so that another controller can take it at once."""
        await self._stop()
        if self._world.lease_holder == self._own_process.name:
            self._world.lease_holder = ""

    async def remove(self) -> None:
        """Remove the lease: the fleet has ended."""
        await self.release()

    def _hold(self, begun: float) -> None:
        self._world.lease_holder = self._own_process.name
        self._world.num_renewals += 1
        self._renewed(begun)

    async def _reach(self) -> None:
        """Wait for the answer of the lease's host. Raises `LeadershipUnknown`."""
        network, host = self._world.network, self._own_process.host
        lease_host = network.host(LEASE_HOST)
        if network.is_partitioned(host, lease_host):
            await asyncio.sleep(self.lease_timeout_s)
            raise LeadershipUnknown(f"{LEASE_HOST} does not answer")
        await asyncio.sleep(max(0.0, network.arrival(host, lease_host, 0) - self._clock()))


class SimRouterClient(RouterClient):
    """Declares instances to the routers, and records the controller."""

    def __init__(self, backend: SimBackend) -> None:
        super().__init__(TOKEN)
        self._backend = backend

    async def declare(self, *args: Any, **options: Any) -> Mapping[str, RouterInstanceView] | None:
        """Declare instances to the routers, and record the controller."""
        self._backend.record_action("declares instances")
        return await super().declare(*args, **options)


class SimBackend(FleetBackend):
    """The members of a `FleetWorld`, for the controller of this process."""

    poll_s = 0.05
    num_routers = 1

    def __init__(self, world: FleetWorld, process: SimProcess) -> None:
        self.changed = asyncio.Event()
        self._world, self._process = world, process
        if world.num_controllers > 1:
            self.leadership = SimLeadership(world, process)

    def record_action(self, action: str) -> None:
        """Record an action of a controller that does not hold the lease."""
        world = self._world
        if world.num_controllers > 1 and world.lease_holder not in ("", self._process.name):
            world.actions_without_lease.append(f"{self._process.name} {action}, {world.lease_holder} has the lease")

    def use(self, fleet: DesiredFleet) -> None:
        """Does nothing: all fleets can be run."""

    async def open(self) -> None:
        """Does nothing: the world has the members of an earlier controller."""

    def members(self) -> Sequence[Member]:
        """The members with their current state."""
        return [member.member() for member in self._world.started.values()]

    async def start(self, member: MemberSpec) -> None:
        """Start a new process on the host with the member's name."""
        self.record_action(f"starts {member.name}")
        self._world.start_member(member)
        self.changed.set()

    async def stop(self, name: str, grace_s: float) -> None:
        """Stop the member as SIGTERM does, and after `grace_s` as SIGKILL does."""
        self.record_action(f"stops {name}")
        started = self._world.started.get(name)
        if started is None:
            return
        loop = asyncio.get_running_loop()
        until, process = loop.time() + grace_s, started.what.process
        if process.is_alive and not started.is_stopping:
            started.is_stopping = True
            self._world.on_stop(started, grace_s)
            self._world.before_member_change(started)
            started.what.stop()
        while process.is_alive and process.tasks() and loop.time() < until:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(self.poll_s)
        if self._world.started.get(name) is started:
            self._world.forget_member(name)
            self.changed.set()

    async def assign(self, name: str, role: MemberRole) -> None:
        """Change the member's role."""
        self.record_action(f"changes the role of {name}")
        started = self._world.started.get(name)
        if started is not None:
            self._world.before_member_change(started, role)
            self.changed.set()

    async def close(self) -> None:
        """Release the leadership; members outlive the backend."""
        if self.leadership is not None:
            await self.leadership.release()


@dataclass
class _SimController:
    """A controller across its processes, and its ledger."""

    ledger: Ledger
    process: SimProcess | None = None

    @property
    def is_running(self) -> bool:
        """True if it has a live process with tasks."""
        return self.process is not None and self.process.is_alive and bool(self.process.tasks())


class FleetWorld(World):
    """A deployment that a controller starts and reconciles. `router` of the spec: settings of its routers."""

    restart_delay_s = 1.0
    """Seconds until a controller that has ended for another one is restarted."""
    grace_s = 30.0
    router_starts_s = 1.0
    ready_timeout_s = 120.0

    def __init__(
        self, spec: WorldSpec, fleet: DesiredFleet, seed: int, *, num_controllers: int = 1, keep_log: bool = False
    ) -> None:
        none = replace(spec, num_prefill=0, num_decode=0, num_both=0, num_routers=0, num_units=0)
        super().__init__(none, seed, keep_log=keep_log)
        self.started: dict[str, StartedMember] = {}
        self.before_change: Callable[[SimInstance], None] = lambda _: None
        """Called with an instance before it stops or has another role."""
        self.on_start: Callable[[MemberSpec], None] = lambda _: None
        """Called before a member starts."""
        self.on_stop: Callable[[StartedMember, float], None] = lambda *_: None
        """Called before a member is stopped, with the seconds that it has for its requests."""
        self._fleet = fleet
        self._last: dict[str, SimInstance | SimRouter] = {}
        self.num_controllers = num_controllers
        self._controllers: list[_SimController] = []
        self._num_started = 0
        self.lease_holder = ""
        """The process of the controller that holds the lease; empty: none."""
        self.num_renewals = 0
        self.actions_without_lease: list[str] = []
        """Actions of controllers while another one held the lease."""

    @contextmanager
    def running(self) -> Iterator[World]:
        """Run the world while the body runs; the ledger is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="kvferry-sim-") as folder:
            for number in range(self.num_controllers):
                ledger = Ledger(Path(folder) / f"fleet{number}")
                ledger.apply(self._fleet)
                self._controllers.append(_SimController(ledger))
            with super().running():
                yield self

    def _start(self) -> None:
        self.start_controllers()
        self.run_until(lambda: self.is_settled, self.ready_timeout_s + self.spec.instance.start_s)
        super()._start()

    # The controllers.

    def start_controllers(self) -> None:
        """Start each controller that does not run."""
        for controller in self._controllers:
            if controller.process is None or not controller.process.is_alive:
                self._start_controller(controller)

    def _start_controller(self, controller: _SimController) -> None:
        self._num_started += 1
        host = self.network.host(f"controller{self._num_started}")
        controller.process = process = host.process(host.address)
        loop = process.thread("controller")
        loop.call_soon(lambda: loop.create_task(self._control(controller, process)))

    async def _control(self, slot: _SimController, process: SimProcess) -> None:
        """Run a controller until it ends. It is restarted if it has lost the leadership."""
        backend, clock = SimBackend(self, process), self.simulation
        async with SimRouterClient(backend) as router_client:
            controller = Controller(slot.ledger, backend, router_client, _Silent(), clock, grace_s=self.grace_s)
            process.on_end[controller] = controller.close  # the kernel closes it when a process ends
            try:
                end = await controller.run()
                if isinstance(end, ShutdownRequested):
                    await controller.shut_down()
                await backend.close()
            finally:
                process.on_end.pop(controller, None)
                controller.close()
        if isinstance(end, LeadershipLost):
            self.network.loop.call_later(self.restart_delay_s, self._start_controller, slot)

    @property
    def _has_leader(self) -> bool:
        """True if the process that holds the lease is alive."""
        return self.controller_process.name == self.lease_holder and self.controller_process.is_alive

    @property
    def _leader(self) -> _SimController:
        """The current or last leader."""
        for controller in self._controllers:
            if controller.process is not None and controller.process.name == self.lease_holder:
                return controller
        return self._controllers[0]

    @property
    def ledger(self) -> Ledger:
        """The leader's ledger."""
        return self._leader.ledger

    @property
    def controller_process(self) -> SimProcess:
        """The leader's process."""
        process = self._leader.process
        assert process is not None
        return process

    @property
    def is_settled(self) -> bool:
        """True if there is a leader, and it has reached the desired state."""
        if self.num_controllers > 1 and not self._has_leader:
            return False
        seen = self.ledger.status()
        return seen is not None and seen.settled and seen.number == self.ledger.desired_state().number

    def apply(self, fleet: DesiredFleet) -> None:
        """Apply another spec."""
        for controller in self._controllers:
            controller.ledger.apply(fleet)
        self.simulation.note("another fleet is applied")

    # Its members.

    def hosts(self) -> list[SimHost]:
        """The hosts of all members, of the controllers, and of the lease if there is one."""
        controllers = [controller.process.host for controller in self._controllers if controller.process is not None]
        lease_hosts = [self.network.host(LEASE_HOST)] if len(controllers) > 1 else []
        return [*super().hosts(), *controllers, *lease_hosts]

    def open_routers(self) -> list[SimRouter]:
        """Ready routers that are not stopping, as for a load balancer; all earlier routers if there is none."""
        ready = [
            member.what
            for member in self.started.values()
            if isinstance(member.what, SimRouter) and member.what.is_ready and not member.is_stopping
        ]
        return ready or [member for member in self._last.values() if isinstance(member, SimRouter)]

    def start_member(self, spec: MemberSpec) -> None:
        """Start a member, for the backend. Raises `NotStarted`."""
        if spec.name in self.started:
            raise NotStarted(f"{spec.name} is already running")
        self.simulation.note(f"{spec.name} is started")
        self.on_start(spec)
        process_object = self._last.get(spec.name)
        if process_object is not None:
            if isinstance(process_object, SimInstance) and spec.role != "router":
                process_object.role = spec.role  # its last process may have had another role
            process_object.restart()
        elif spec.role == "router":
            config = RouterConfig(declared=True, **self.spec.router)
            start_delay_s = min(self.router_starts_s, self.spec.instance.start_s)
            process_object = SimRouter(self.network.host(spec.name), PORT, config, TOKEN, start_delay_s=start_delay_s)
        else:
            process, kind = self.network.host(spec.name).process(spec.name), self.spec.instance_of(spec.role)
            process_object = SimInstance(spec.name, spec.role, kind, process, PORT, TOKEN, self.storage)
            process_object.start(kind.start_s)
        self.started[spec.name] = StartedMember(spec, process_object)
        self._last[spec.name] = process_object
        if isinstance(process_object, SimRouter):
            self.routers.append(process_object)
        else:
            self.instances.append(process_object)

    def before_member_change(self, started: StartedMember, role: MemberRole | None = None) -> None:
        """Call `before_change` for a member that is about to be stopped or to change its role, for the backend."""
        if isinstance(started.what, SimInstance):
            self.before_change(started.what)
            if role is not None and role != "router":
                started.spec, started.what.role = replace(started.spec, role=role), role

    def forget_member(self, name: str) -> None:
        """End a member's process if it still runs, for the backend, and forget the member."""
        process_object = self.started.pop(name).what
        process_object.crash()
        if isinstance(process_object, SimInstance):
            self.instances.remove(process_object)
        else:
            self.routers.remove(process_object)

    # The end.

    def shut_down(self) -> bool:
        """Delete the fleet, so that its controller ends everything; returns True if all of it ended."""
        members = [member.what.process for member in self.started.values()]
        for controller in self._controllers:
            controller.ledger.delete()
        self.run_until(
            lambda: not (self.started or any(controller.is_running for controller in self._controllers)),
            self.ready_timeout_s,
        )
        return (
            super().shut_down()
            and not any(process.tasks() for process in members if process.is_alive)
            and not self.started
        )


class _Silent:
    """A display that ignores everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None
