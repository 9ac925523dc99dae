"""The controller of one fleet: observes it, has `plan` compute the next steps, and has the backend take them.

    observe   processes by the backend, and requests by the routers (`observer`)
    scale     the counts follow the traffic, if the spec has `[scale]` (`desired_counts`)
    declare   to the routers: these instances serve, and these are leaving
    plan      the steps from the observed to the desired state, for instances and for routers (`loop`)
    act       each step is recorded in the ledger first, and runs beside the others

It can die at any moment: the ledger has the desired state, and the rest is observed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.fleet.control.backend import FleetBackend, Member, MemberSpec, MemberState
from kvferry.fleet.control.backoff import record_failure
from kvferry.fleet.control.desired_counts import Scaling
from kvferry.fleet.control.election import Election
from kvferry.fleet.control.facts import Drain, Failure, Phase, Start, Step, StopMember, SwitchRole
from kvferry.fleet.control.follower import SpecFollower
from kvferry.fleet.control.hangs import HangWatch
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.loop import plan
from kvferry.fleet.control.observer import Observer
from kvferry.fleet.control.report import FleetView, StatusReporter, is_hopeless
from kvferry.fleet.control.role_switch import NotSwitched, require_first_switch, switch_server
from kvferry.fleet.control.router_client import RouterClient
from kvferry.fleet.display import Display
from kvferry.fleet.spec.fleet_spec import MemberRole, seconds

logger = logging.getLogger(__name__)

_SETTLED_TICK_S, _BUSY_TICK_S, _MIN_TICK_S = 0.5, 0.1, 0.02
_SOON_S = 1.0
"""Seconds of waiting for the end of members before their names are shown."""


@dataclass(frozen=True)
class ShutdownRequested:
    """The fleet must end, because of this signal or a call."""

    number: int | None = None


@dataclass(frozen=True)
class Detached:
    """The controller ends, and the fleet continues."""


@dataclass(frozen=True)
class LeadershipLost:
    """Another controller may lead now, because this one did not renew its leadership in time."""


@dataclass(frozen=True)
class FleetFailed:
    """A member failed before the fleet was up, or no instance is left that could answer, and none may be started.
    `member`: the member that failed last."""

    member: Member | None
    reason: str


End = ShutdownRequested | Detached | LeadershipLost | FleetFailed


class Steps:
    """Steps that are being taken, each in a task of its own."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.tasks = BackgroundTasks()

    def begin(self, step: Coroutine[Any, Any, None]) -> None:
        """Begin this step beside the others."""
        self.tasks.add(self.group.create_task(step))


class Controller:
    """Owns the record of failures. `attended`: a user waits until the fleet is up, and the controller ends if it cannot
    come up. `wait_for_leadership`: if another controller leads the fleet, wait until it has ended.
    `follows_file`: this process also copies a file into the ledger while this controller leads. `grace_s`: seconds that
    members have for running requests when the fleet ends."""

    leave_s = 5.0
    """Maximum seconds in which a member that is no longer needed ends."""

    def __init__(
        self,
        ledger: Ledger,
        backend: FleetBackend,
        router_client: RouterClient,
        display: Display,
        clock: Clock,
        *,
        attended: bool = False,
        wait_for_leadership: bool = True,
        follows_file: bool = False,
        grace_s: float = 35.0,
    ) -> None:
        self._ledger, self._backend, self._display = ledger, backend, display
        self._clock, self._attended, self._grace_s = clock, attended, grace_s
        self._observer, self._hangs = Observer(router_client), HangWatch(self._on_hung)
        self._scaling = Scaling(ledger, clock)
        self._failures: list[Failure] = []
        self._last_failed: Member | None = None
        self._follower = SpecFollower(ledger, backend, self._failures)
        self._reporter = StatusReporter(ledger, display, clock)
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._election = Election(
            ledger, backend, display, self._end, wait_for_leadership=wait_for_leadership, follows_file=follows_file
        )

    # From the beginning to the end.

    async def run(self) -> End:
        """Manage the fleet until it must end, or until `end` is called. The members keep running. Raises `ConfigError`
        if the fleet cannot be run here."""
        if not await self._election.win(self._follower.refresh):
            self.end(Detached())  # unless `end` was called meanwhile
            return self._end.result()
        try:
            await self._backend.open()
        except ConfigError:
            if self._election.is_leader:
                raise
            return LeadershipLost()
        await self._adopt()
        async with asyncio.TaskGroup() as group:
            steps = Steps(group)
            reconciling: asyncio.Future[Any] = group.create_task(self._reconcile_loop(steps))
            await asyncio.wait([self._end, reconciling], return_when=asyncio.FIRST_COMPLETED)
            reconciling.cancel()
            steps.tasks.cancel()
            self._hangs.end()
        return self._end.result()

    def close(self) -> None:
        """Let another controller lead. Called last, when the members have been ended or detached."""
        self._election.close()

    def end(self, end: End) -> None:
        """Stop the controller, for this reason; the first one counts."""
        if not self._end.done():
            self._end.set_result(end)

    @property
    def has_ended(self) -> bool:
        """True once the controller must stop, for any reason."""
        return self._end.done()

    @property
    def is_up(self) -> bool:
        """True once all desired members have served."""
        return self._reporter.is_up

    async def _adopt(self) -> None:
        members = self._backend.members()
        for member in members:
            self._ledger.record("found", member.name, member.reason)
        if members:
            self._display.note(f"found {', '.join(sorted(member.name for member in members))}")
            await self._observer.adopt(members)
            self._scaling.adopt(await self._observer.plan(members))

    async def shut_down(self) -> None:
        """End all members: routers first, so that they can finish their answers while instances still serve."""
        self._backend.begin_shutdown()
        members = self._backend.members()
        for is_router in (True, False):
            await self._stop_all([member.name for member in members if (member.role == "router") is is_router])
        await self._election.remove()
        self._ledger.record("ended")

    async def _stop_all(self, names: Sequence[str]) -> None:
        """Stop these members, and show the names of those that take long."""
        ending = {name: asyncio.create_task(self._backend.stop(name, self._grace_s)) for name in names}
        soon_s = min(_SOON_S, self._grace_s)
        for for_s, text in (
            (soon_s, "waiting for {}"),
            (self._grace_s - soon_s, f"killing {{}}: not ended within {self._grace_s:g} s"),
        ):
            if ending:
                await asyncio.wait(ending.values(), timeout=for_s)
            left = [name for name, task in ending.items() if not task.done()]
            if not left:
                break
            self._display.note(text.format(", ".join(left)))
        await asyncio.gather(*ending.values())

    # The rounds.

    async def _reconcile_loop(self, steps: Steps) -> None:
        while not self._end.done():
            self._backend.changed.clear()
            begun = self._clock.monotonic()
            try:
                pause_s = await self._reconcile(steps)
            except (ConfigError, OSError) as error:  # OSError: the disk is full, or there is no free descriptor
                pause_s = _SETTLED_TICK_S
                self._log_failure_or_end(str(error))
            await asyncio.sleep(_MIN_TICK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, begun + pause_s - self._clock.monotonic())):
                    await self._backend.changed.wait()

    async def _reconcile(self, running: Steps) -> float:
        """Do one round. Returns the seconds until the next one."""
        if not self._election.is_leader:
            self.end(LeadershipLost())
            return 0.0
        desired = self._follower.refresh()
        if desired.deleted:
            self.end(ShutdownRequested())
            return 0.0
        fleet = self._scaling.desired_fleet(desired.fleet)
        routers = fleet.front(self._backend.num_routers)
        members = list(self._backend.members())
        await self._observer.declare(fleet, members, self._scaling.plan(fleet))
        if self._observer.has_routers and self._scaling.is_due(fleet):
            reports = await self._observer.traffic(members)
            seen = self._observer.observe(members, self._clock.monotonic())
            instances = [instance for instance in seen if instance.role != "router"]
            await self._scaling.decide(fleet, instances, reports, self._observer.decode_capacity())
        # Steps may have ended while the routers answered. From here to the steps of this round, nothing is awaited.
        members = list(self._backend.members())
        now = self._clock.monotonic()
        seen = self._observer.observe(members, now)
        steps = [
            *plan(routers, [instance for instance in seen if instance.role == "router"], self._failures, now),
            *plan(fleet, [instance for instance in seen if instance.role != "router"], self._failures, now),
        ]
        by_name = {member.name: member for member in members}
        begun_steps = [step for step in steps if self._begin(step, by_name.get(step.name), running)]
        staying = [member for member in members if member.name not in self._observer.stopping]
        self._hangs.follow(staying, seconds(fleet.failure.hang), running.group)
        is_moving = any(instance.phase in (Phase.STARTING, Phase.DRAINING) for instance in seen)
        is_stalled = not (steps or is_moving)
        trouble = self._backend.trouble
        self._report(FleetView(fleet, routers, members, seen, self._failures, is_stalled, trouble, now), desired.number)
        return _BUSY_TICK_S if is_moving or begun_steps else _SETTLED_TICK_S

    def _drain(self, name: str, reason: str) -> None:
        self._ledger.record("drain", name, reason)
        self._display.note(f"draining {name}: {reason}")
        self._observer.draining.add(name)

    # Steps.

    def _begin(self, step: Step, member: Member | None, running: Steps) -> bool:
        """Begin a step. False: it is being taken already, or cannot be taken now."""
        name, observer = step.name, self._observer
        match step:
            case Start() if self._backend.trouble:
                return False
            case Start(role=role, revision=revision, unit=unit, reason=reason):
                new = MemberSpec(name, role, revision, unit)
                self._ledger.record("start", name, reason)
                self._display.starting([name])
                observer.begin(new, self._clock.monotonic())
                running.begin(self._start(new))
            case _ if member is None or name in observer.stopping:
                return False
            case Drain(reason=reason) if member.role == "router" or not observer.has_routers:
                self._ledger.record("stop", name, reason)
                observer.stopping.add(name)
                running.begin(self._stop(name, self._grace_s))
            case Drain(reason=reason):
                if name in observer.draining:
                    return False
                self._drain(name, reason)
            case StopMember(reason=reason, failed=failed):
                self._ledger.record("stop", name, reason)
                if failed:
                    self._member_failed(member, reason)
                observer.stopping.add(name)
                running.begin(self._stop(name, 0.0 if failed else self.leave_s))
            case SwitchRole(role=role, reason=reason):
                self._ledger.record("role", name, f"{role}: {reason}")
                self._display.note(f"{name} becomes {role}: {reason}")
                observer.begin_role_switch(name)
                fleet = self._follower.followed.fleet
                if fleet.engine.kind == "sglang" and observer.has_routers:
                    observer.switching[name] = role
                    running.begin(self._switch(member, role, seconds(fleet.failure.drain)))
                else:
                    running.begin(self._assign(name, role))
        return True

    async def _start(self, member: MemberSpec) -> None:
        try:
            await self._backend.start(member)
        except Exception as error:
            # Any error in one member's start must not end the controller of all members.
            if not isinstance(error, KvferryError):
                logger.exception("%s cannot be started", member.name)
            reason = str(error) or type(error).__name__
            self._observer.starting.pop(member.name, None)
            self._ledger.record("not started", member.name, reason)
            if not self._backend.trouble:
                self._record_failure(member.role, member.revision, reason)
            self._log_failure_or_end(f"{member.name}: {reason}")
            self._backend.changed.set()

    async def _stop(self, name: str, grace_s: float) -> None:
        try:
            await self._backend.stop(name, grace_s)
        except Exception:
            # As above. A member that still exists is stopped again.
            logger.exception("%s cannot be stopped", name)
        finally:
            self._observer.stopping.discard(name)
            self._observer.draining.discard(name)

    async def _assign(self, name: str, role: MemberRole) -> None:
        try:
            await self._backend.assign(name, role)
        except Exception:
            # As above. The change of role is tried again.
            logger.exception("the role of %s cannot be changed to %s", name, role)

    async def _switch(self, member: Member, role: MemberRole, drain_s: float) -> None:
        """Change the role of a server that must be idle for this. A server that does not change its role is
        replaced."""
        name, observer, until = member.name, self._observer, self._clock.monotonic() + drain_s
        try:
            require_first_switch(name, role)
            await self._wait_for(lambda: observer.is_drained(name), until, "not drained")
            observer.withdrawn.add(name)
            await self._wait_for(lambda: not observer.is_listed(name), until, "routers still know it")
            await switch_server(member.url, role, self._clock, total_timeout_s=drain_s)
            await self._assign(name, role)
        except NotSwitched as error:
            self._drain(name, f"does not become {role}: {error}")
        finally:
            observer.switching.pop(name, None)
            observer.withdrawn.discard(name)

    async def _wait_for(self, holds: Callable[[], bool], until: float, why_not: str) -> None:
        """Wait for a condition that later rounds may observe. Raises `NotSwitched` at the time `until`."""
        while not holds():
            if self._clock.monotonic() >= until:
                raise NotSwitched(f"{why_not} in time")
            await asyncio.sleep(_BUSY_TICK_S)

    async def _on_hung(self, name: str, reason: str) -> None:
        member = next((member for member in self._backend.members() if member.name == name), None)
        if member is not None and member.state is MemberState.SERVING and name not in self._observer.stopping:
            self._ledger.record("stop", name, reason)
            self._member_failed(member, reason)
            self._observer.stopping.add(name)
            await self._stop(name, 0.0)

    # What fails.

    def _member_failed(self, member: Member, reason: str) -> None:
        self._last_failed = member
        self._record_failure(member.role, member.revision, reason)
        if self._attended and not self.is_up:
            self.end(FleetFailed(member, reason))
        else:
            logger.warning("%s %s", member.name, reason)

    def _record_failure(self, role: MemberRole, revision: str, reason: str) -> None:
        failure = Failure(role, revision, self._clock.monotonic(), reason)
        record_failure(self._failures, failure, self._follower.followed.fleet.failure.crash_loop)

    def _log_failure_or_end(self, text: str) -> None:
        """Log a failure; if the fleet is attended and has never come up, end it with this failure."""
        if self._attended and not self.is_up:
            self.end(FleetFailed(None, text))
        else:
            logger.warning("%s", text)

    def _report(self, view: FleetView, number: int) -> None:
        status = self._reporter.status(view, number, self._follower.refused, self._scaling.last_decision)
        if self._attended and self.is_up and is_hopeless(status):
            self.end(FleetFailed(self._last_failed, "; ".join(status.trouble)))
        self._reporter.write(status)
