"""Fleets of small programs for tests: what each role runs is given, and all else is as in any fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cli.serving.attended import AttendedFleet
from kvferry.fleet.display import Display
from kvferry.fleet.processes.cpu import Cores
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.spec.fleet_spec import DesiredFleet, FailureSpec, MemberRole, RoleSpec, RouterSpec

Make = Callable[[str], ProcessSpec]
"""What a member of this name runs."""

SECRET = "a token of tests"
USUAL, NO_RESTARTS = FailureSpec(), FailureSpec(crash_loop=1)


@dataclass(frozen=True)
class Programs:
    """A recipe (see `kvferry.fleet.control.backend.Recipe`): each role runs what is given for it."""

    fleet: DesiredFleet
    makes: Mapping[MemberRole, Make]
    cores: Cores = (0,)
    addresses: Sequence[tuple[str, int]] = ()

    @property
    def num_instances(self) -> int:
        return self.fleet.num_instances

    @property
    def num_routers(self) -> int:
        return self.fleet.router.count or 0

    def on_node(self, host: str) -> Programs:
        return self

    def instance(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        return self.makes[role](name)

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        return self.makes["router"](name)


def fleet_of(makes: Mapping[MemberRole, Make], failure: FailureSpec = USUAL, **counts: int) -> DesiredFleet:
    """As many of each role as `counts` says: by default, one of each that is in `makes`."""
    numbers = {role: counts.get(role, 1) for role in makes}
    return DesiredFleet(
        name="fleet",
        model="m",
        mode="pooling",
        role={role: RoleSpec(count=number) for role, number in numbers.items() if role != "router"},
        router=RouterSpec(count=numbers.get("router", 0), port=0),
        failure=failure,
    )


def attended(
    display: Display,
    makes: Mapping[MemberRole, Make],
    failure: FailureSpec = USUAL,
    *,
    grace_s: float = 10.0,
    end_margin_s: float = 5.0,
    cores: Cores = (0,),
    fork_server: Any = None,
    **counts: int,
) -> AttendedFleet:
    """A fleet in the foreground."""
    return AttendedFleet(
        fleet_of(makes, failure, **counts),
        lambda fleet: Programs(fleet, makes, cores),
        display,
        token=SECRET,
        grace_s=grace_s,
        end_margin_s=end_margin_s,
        fork_server=fork_server,
    )


async def run(display: Display, makes: Mapping[MemberRole, Make], failure: FailureSpec = USUAL, **more: Any) -> int:
    """Until it ends; returns the exit code."""
    return await attended(display, makes, failure, **more).run()


async def up(
    display: Any, makes: Mapping[MemberRole, Make], failure: FailureSpec = USUAL, **more: Any
) -> asyncio.Task[int]:
    """One that everything serves of."""
    task = asyncio.create_task(run(display, makes, failure, **more))
    reached = asyncio.create_task(display.until(lambda seen: bool(seen.of("up"))))
    await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
    if not reached.done():
        reached.cancel()
        raise AssertionError(f"the fleet ended with {task.result()} and was never up: {display.told}")
    return task
