"""The contract of fleet backends. In a package that provides one:

    from kvferry.testing.backends import BackendContract

    class TestMyBackend(BackendContract):
        kind = "my_package.my_module:MyBackend"

Members are programs of a few lines that speak the start protocol (`kvferry.fleet.processes.ready`), as kvferry's own
processes do. A member's name selects its behaviour: it `serves`, `fails`, has `wrong` settings, `waits` and never
serves, or `stays` after SIGTERM. If members are not processes that a recipe describes, override `around` and `end`.
Coroutines are run by `asyncio.run`, so no plugin is needed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.backend import (
    BackendContext,
    FleetBackend,
    Member,
    MemberSpec,
    MemberState,
    NotStarted,
    backend_class,
)
from kvferry.fleet.processes.cpu import Cores
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, RoleSpec, RouterSpec

PROGRAM = """
import os, pathlib, signal, sys, time
from kvferry.fleet.processes.ready import ReadyWriter
what, name, folder, ready = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[-1])
if what == "wrong":
    print("kvferry: error: the model is not there", file=sys.stderr, flush=True)
    sys.exit(2)
if what == "fails":
    print("the last words", file=sys.stderr, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "stays" else lambda *_: os._exit(0))
writer = ReadyWriter(ready)
writer.progress("loading", 0.5)
if what != "waits":
    writer.ready({"url": f"http://{name}:1"})
print(name, "runs", flush=True)
while not (folder / name).exists():
    time.sleep(0.02)
print("the last words", file=sys.stderr, flush=True)
sys.exit(7)
"""


@dataclass(frozen=True)
class Programs:
    """A recipe (`kvferry.fleet.control.backend.Recipe`) of such programs; a program exits when there is a file with
    its name in `ends`."""

    fleet: DesiredFleet
    ends: Path
    cores: Cores = (0,)
    addresses: Sequence[tuple[str, int]] = ()

    @property
    def num_instances(self) -> int:
        """The number of instances in the fleet."""
        return self.fleet.num_instances

    @property
    def num_routers(self) -> int:
        """0: there are no routers."""
        return 0

    def on_node(self, host: str) -> Programs:
        """The same programs: they do not depend on the node."""
        return self

    def instance(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        """The program that the name selects."""
        kind = name.partition("-")[0]
        return ProcessSpec(name, (sys.executable, "-c", PROGRAM, kind, name, str(self.ends)))

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        """The program of a router, built like an instance's."""
        return self.instance(name, "router", 0, ())


class NullWatcher:
    """A watcher that ignores everything."""

    def line(self, name: str, text: str) -> None:
        """Ignore a line of a log."""

    def progress(self, name: str, phase: str, fraction: float) -> None:
        """Ignore the progress of a start."""

    def ready(self, name: str, url: str) -> None:
        """Ignore that a member serves."""


@asynccontextmanager
async def leading(backend: FleetBackend) -> AsyncIterator[None]:
    """Hold the backend's leadership, as the controller that acts does."""
    leadership = backend.leadership
    if leadership is None:
        yield
        return
    while not await leadership.try_acquire():  # noqa: ASYNC110 - within the caller's deadline
        await asyncio.sleep(0.1)
    heartbeat = asyncio.create_task(leadership.heartbeat())
    try:
        yield
    finally:
        heartbeat.cancel()


class BackendContract:
    """The suite. Set `kind` in a subclass, as in `[backend] kind`."""

    margin_s = 20.0
    """Max seconds that a stop may take beyond its grace."""
    hangs_s = 60.0
    """A test that takes longer has failed."""

    kind: ClassVar[str]

    # Overridden for backends whose members are not processes.

    def fleet(self, name: str = "contract") -> DesiredFleet:
        """A fleet's specification, with the settings that the backend needs."""
        return DesiredFleet(
            name=name, model="m", mode="pooling", role={"both": RoleSpec(count=8)}, router=RouterSpec(count=0)
        )

    @asynccontextmanager
    async def around(self, folder: Path) -> AsyncIterator[None]:
        """The environment in which backends are used; entered once for each test."""
        (folder / "ends").mkdir()
        yield

    def make(self, folder: Path, fleet: DesiredFleet) -> FleetBackend:
        """A backend that is not opened yet."""
        member_folder = folder / fleet.name
        member_folder.mkdir(mode=0o700, exist_ok=True)
        context = BackendContext(
            member_folder, lambda fleet_spec: Programs(fleet_spec, folder / "ends"), NullWatcher(), token="a token"
        )
        return backend_class(self.kind)(context)

    async def end(self, folder: Path, name: str) -> None:
        """Have a member end by itself, with exit code 7."""
        (folder / "ends" / name).touch()

    # Helpers of the suite.

    @asynccontextmanager
    async def opened(self, folder: Path, name: str = "contract") -> AsyncIterator[FleetBackend]:
        """A backend as a controller opens it: members outlive it."""
        fleet = self.fleet(name)
        backend = self.make(folder, fleet)
        backend.use(fleet)
        async with leading(backend):
            try:
                await backend.open()
                yield backend
            finally:
                await backend.close()

    def run(self, folder: Path, use: Callable[[FleetBackend], Awaitable[None]]) -> None:
        """Call `use` with an open backend."""

        async def main() -> None:
            async with self.opened(folder) as backend:
                await use(backend)

        self.run_alone(folder, main)

    def run_alone(self, folder: Path, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main`, which opens backends one after the other; a last backend then stops all remaining members."""

        async def within() -> None:
            async with asyncio.timeout(self.hangs_s), self.around(folder):
                try:
                    await main()
                finally:
                    async with self.opened(folder) as backend:
                        await asyncio.gather(*(backend.stop(member.name, 0.0) for member in backend.members()))
                        assert not backend.members()

        asyncio.run(within())

    # The suite.

    def test_a_member_from_its_start_to_its_end(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            assert list(backend.members()) == []
            await start(backend, "serves-0", role="prefill", revision="r1", unit="unit-0")
            assert [running.name for running in backend.members()] == ["serves-0"]
            member = await until(backend, "serves-0", MemberState.SERVING)
            assert (member.role, member.revision, member.unit) == ("prefill", "r1", "unit-0")
            assert member.url.startswith(("http://", "https://"))
            assert member.reason == ""
            backend.changed.clear()
            await backend.stop("serves-0", self.margin_s)
            assert list(backend.members()) == []
            assert backend.changed.is_set()

        self.run(tmp_path, use)

    def test_several_at_a_time(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            names = [f"serves-{number}" for number in range(4)]
            await asyncio.gather(*(start(backend, name) for name in names))
            assert sorted(member.name for member in backend.members()) == names
            urls = {(await until(backend, name, MemberState.SERVING)).url for name in names}
            assert len(urls) == len(names)
            await asyncio.gather(*(backend.stop(name, self.margin_s) for name in names[1:]))
            assert [member.name for member in backend.members()] == names[:1]
            assert named(backend, "serves-0").state is MemberState.SERVING

        self.run(tmp_path, use)

    def test_one_that_ends_while_it_starts_stays_until_it_is_stopped(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "fails-0")
            member = await until(backend, "fails-0", MemberState.ENDED)
            assert "7" in member.reason  # its exit code
            assert not member.is_misconfigured
            assert member.last_lines[-1] == "the last words"
            await backend.stop("fails-0", self.margin_s)
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_one_that_ends_after_it_has_served(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "serves-0")
            await until(backend, "serves-0", MemberState.SERVING)
            await self.end(tmp_path, "serves-0")
            member = await until(backend, "serves-0", MemberState.ENDED)
            assert "7" in member.reason
            assert not member.is_misconfigured

        self.run(tmp_path, use)

    def test_wrong_settings_differ_from_failures(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "wrong-0")
            member = await until(backend, "wrong-0", MemberState.ENDED)
            assert member.is_misconfigured
            assert member.reason == "the model is not there"

        self.run(tmp_path, use)

    def test_a_name_can_be_used_again(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "serves-0", revision="r1")
            await until(backend, "serves-0", MemberState.SERVING)
            await backend.stop("serves-0", 0.0)
            await start(backend, "serves-0", revision="r2")
            member = await until(backend, "serves-0", MemberState.SERVING)
            assert member.revision == "r2"

        self.run(tmp_path, use)

    def test_a_name_that_is_there_is_not_started_again(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "serves-0", revision="r1")
            try:
                await start(backend, "serves-0", revision="r2")
            except NotStarted:
                member = await until(backend, "serves-0", MemberState.SERVING)
                assert member.revision == "r1"
            else:
                raise AssertionError("it was started a second time")

        self.run(tmp_path, use)

    def test_unknown_names_are_nothing_to_do(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await backend.stop("serves-7", self.margin_s)
            await backend.assign("serves-7", "decode")
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_one_that_does_not_serve_yet_can_be_stopped(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "waits-0")
            assert named(backend, "waits-0").state is MemberState.STARTING
            assert named(backend, "waits-0").url == ""
            await backend.stop("waits-0", self.margin_s)
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_one_whose_start_is_under_way_can_be_stopped(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            starting = asyncio.create_task(start(backend, "serves-0"))
            while not backend.members():  # noqa: ASYNC110 - until the member is listed
                await asyncio.sleep(0)
            await backend.stop("serves-0", self.margin_s)
            assert list(backend.members()) == []  # "returns when it is gone"
            with suppress(NotStarted):
                await starting
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_one_that_stays_is_killed_after_its_grace(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "stays-0")
            await until(backend, "stays-0", MemberState.SERVING)
            begun = SYSTEM_CLOCK.monotonic()
            await backend.stop("stays-0", 1.0)
            assert SYSTEM_CLOCK.monotonic() - begun < 1.0 + self.margin_s
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_less_grace_may_be_given_meanwhile(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "stays-0")
            await until(backend, "stays-0", MemberState.SERVING)
            patient = asyncio.create_task(backend.stop("stays-0", 3600.0))
            await asyncio.sleep(0)
            await backend.stop("stays-0", 0.0)
            await patient
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_a_cancelled_stop_can_be_requested_again(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "stays-0")
            await until(backend, "stays-0", MemberState.SERVING)
            patient = asyncio.create_task(backend.stop("stays-0", 3600.0))
            await asyncio.sleep(0)
            patient.cancel()
            await asyncio.wait([patient])
            assert [member.name for member in backend.members()] == ["stays-0"]
            await backend.stop("stays-0", 0.0)
            assert list(backend.members()) == []

        self.run(tmp_path, use)

    def test_a_later_controller_finds_members_of_an_earlier_one(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as earlier:
                await start(earlier, "serves-0", role="prefill", revision="r1", unit="unit-0")
                await start(earlier, "serves-1", role="prefill")
                await start(earlier, "serves-2")
                left = [await until(earlier, f"serves-{number}", MemberState.SERVING) for number in range(3)]
                await earlier.assign("serves-1", "decode")
                assert named(earlier, "serves-1").role == "decode"
            async with self.opened(tmp_path) as later:
                assert named(later, "serves-0") == left[0]
                assert named(later, "serves-1").role == "decode"
                await later.stop("serves-1", self.margin_s)
                await self.end(tmp_path, "serves-2")
                await until(later, "serves-2", MemberState.ENDED)
            async with self.opened(tmp_path) as last:
                assert named(last, "serves-0") == left[0]
                assert sorted(member.name for member in last.members()) == ["serves-0", "serves-2"]
                assert named(last, "serves-2").state is MemberState.ENDED
                assert named(last, "serves-2").reason

        self.run_alone(tmp_path, main)

    def test_one_that_was_starting_when_its_controller_ended_comes_up(self, tmp_path: Path) -> None:
        async def main() -> None:
            async with self.opened(tmp_path) as earlier:
                await start(earlier, "serves-0")
                await start(earlier, "waits-0")
            async with self.opened(tmp_path) as later:
                await until(later, "serves-0", MemberState.SERVING)
                assert named(later, "waits-0").state is MemberState.STARTING

        self.run_alone(tmp_path, main)

    def test_another_fleet_s_members_are_not_seen(self, tmp_path: Path) -> None:
        async def use(backend: FleetBackend) -> None:
            await start(backend, "serves-0", revision="r1")
            async with self.opened(tmp_path, "another") as other:
                assert list(other.members()) == []
                await start(other, "serves-0", revision="r2")
                await other.stop("serves-0", 0.0)
            member = await until(backend, "serves-0", MemberState.SERVING)
            assert member.revision == "r1"

        self.run(tmp_path, use)


async def start(
    backend: FleetBackend, name: str, *, role: MemberRole = "both", revision: str = "r", unit: str = ""
) -> None:
    """Start a member."""
    await backend.start(MemberSpec(name, role, revision, unit))


def named(backend: FleetBackend, name: str) -> Member:
    """The member of this name."""
    return next(member for member in backend.members() if member.name == name)


async def until(backend: FleetBackend, name: str, state: MemberState) -> Member:
    """Wait until a member has this state, by `changed` alone."""
    while named(backend, name).state is not state:
        backend.changed.clear()
        if named(backend, name).state is not state:
            await backend.changed.wait()
    return named(backend, name)
