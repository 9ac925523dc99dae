"""The backend whose members are actors of a Ray cluster, each of which owns a member's process on its node.

The actors of a fleet have a namespace of their own, where a later controller finds them; each proves that it has the
fleet's token. `members` returns the last update of each actor at once, even while a node hangs or Ray's control service
(GCS) is gone. A lost node is recognised by Ray's own error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import AuthenticationFailed, ConfigError
from kvferry.core.keys import Signer
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.core.settings.flags import flag_name, flag_of
from kvferry.fleet.backends.ray.actor import MemberActor
from kvferry.fleet.backends.ray.connection import RayConnection, in_thread, reply_future, result_of
from kvferry.fleet.backends.ray.leadership import RayLeadership, controller_name
from kvferry.fleet.backends.ray.messages import ActorIdentity, LogLine, MemberProgress, MemberUpdate, StartRequest
from kvferry.fleet.backends.ray.placing import (
    Bundle,
    free_indices,
    make_group,
    needs_of,
    num_actors,
    own_cluster_cpus,
    strategy_of,
)
from kvferry.fleet.control.backend import BackendContext, FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.processes.health_check import ask_health
from kvferry.fleet.processes.recipe import ROUTERS
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, seconds

logger = logging.getLogger(__name__)

_ASK_S = 10.0
"""Deadline of a reply from Ray's control service, or from an actor that should answer at once."""
_RETRY_INTERVAL_S, _AT_ONCE = 0.5, 32
_SERVICE = "Ray's control service (GCS)"
_NO_SERVICE = f"{_SERVICE} has not answered for {_ASK_S:g} s; members go on, none is started"
_SEVERAL_NODES = ("--nnodes", "--node-rank", "--master-addr", "--headless")
"""Flags of vLLM and SGLang for a server of which each node runs a part."""
_ON_ONE_NODE = "on Ray, all ranks of a server that is not kvferry's are on one node"


class RayMember:
    """One member; `actor` is the handle of its actor."""

    def __init__(self, actor: Any, view: Member, number: int, bundle: Bundle | None) -> None:
        self.actor, self.view, self.number, self.bundle = actor, view, number, bundle
        self.has_begun = False
        """True if its actor is placed, and has its request."""
        self.is_lost = False
        """True if its actor is gone."""
        self.begun, self.forgotten = asyncio.Event(), asyncio.Event()
        self.last_update = -1
        self.assigned: MemberRole | None = None
        """The role that this controller has given it."""


class RayBackend(FleetBackend):
    """Owns the handles of the actors of further ranks, and a task for each actor that receives its updates."""

    poll_interval_s = 5.0
    """Seconds between two checks that Ray's control service answers."""
    silent_s = 50.0
    """Further seconds in which a silent actor of an earlier controller must answer, before it is ended."""
    gone_s = 3.0
    """Seconds without a reply from an actor and from its member, which has served, before both count as lost. Ray takes
    longer to report a lost node."""
    hurried_s = 3.0
    """The same if there is no grace period."""
    kill_timeout_s = 10.0
    """Seconds after the grace period in which an actor must report that its member is gone."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._fleet: DesiredFleet
        self._members: dict[str, RayMember] = {}
        self._groups: dict[str, tuple[PlacementGroup, tuple[MemberRole, ...]]] = {}
        """Placement groups of units, and of members with several actors, by `_group_key`."""
        self._grouping = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._to_kill: list[Any] = []
        """Handles of actors that could not be ended yet."""
        self._is_connected = False
        self._own = "" if context.outlives else f".{entropy.token_hex(4)}"
        """Part of the namespace of actors that later controllers must not find."""

    num_routers = ROUTERS
    """As many routers as one machine has: they share an address on the controller's node."""

    def use(self, fleet: DesiredFleet) -> None:
        """Start members for this fleet from now on. Raises `ConfigError`."""
        arguments = (*fleet.engine.args, *(flag for role in fleet.role.values() for flag in role.args))
        keys = (flag_name(key) for values in fleet.keys.tables().values() for key in values)
        for flag in (*arguments, *keys):
            if flag_of(flag) in _SEVERAL_NODES:
                raise ConfigError(f"{flag}: {_ON_ONE_NODE}; leave it out")
        _require_ranks(fleet)
        self.context.make_recipe(fleet)
        self._fleet = fleet
        if (
            self.leadership is None and self.context.outlives
        ):  # members that do not outlive this process belong to it alone
            namespace, me = f"{self._namespace}/controller", controller_name(self.context.folder)
            self.leadership = RayLeadership("lease", namespace, me, connect=self._connect)

    async def _connect(self) -> None:
        if not self._is_connected:
            # Members that outlive this process need a cluster that does.
            own_cpus = None if self.context.outlives else own_cluster_cpus(self._fleet)
            await RayConnection.open(self._fleet.backend.address, self._namespace, own_cpus=own_cpus)
            self._is_connected = True

    async def open(self) -> None:
        """Connect to the cluster, and find the members that an earlier controller has left."""
        await self._connect()
        if self.context.outlives:  # others' members end with their processes
            await self._find_all()
        self._tasks.start(self._watch_control_service())

    async def _find_all(self) -> None:
        try:
            names, at_once = await in_thread(self._find_names, _ASK_S), asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(self._find(name, at_once) for name in names))
            await in_thread(self._remove_unused_groups, _ASK_S)
        except (TimeoutError, RayError) as error:
            raise ConfigError(f"Ray does not say which members this fleet has: {error}") from error

    def members(self) -> Sequence[Member]:
        """The members, by the last updates of their actors."""
        return [member.view for member in self._members.values()]

    async def start(self, member: MemberSpec) -> None:
        """Create an actor, which starts the member when Ray has placed it. Raises `NotStarted`."""
        if member.name in self._members:
            raise NotStarted(f"{member.name} is there already")
        if not self._may_act:
            raise NotStarted("another controller looks after this fleet now")
        fleet, context = self._fleet, self.context
        number = -1 if member.role == "router" else self._free_number()
        view = Member(member.name, member.role, member.revision, MemberState.STARTING, unit=member.unit)
        ray_member = self._members[member.name] = RayMember(None, view, number, None)
        try:
            async with asyncio.timeout(_ASK_S):
                if (member.unit and fleet.unit is not None) or num_actors(fleet, member.role) > 1:
                    ray_member.bundle = await self._bundle(member)
                needs = await in_thread(lambda: needs_of(fleet, member.role), _ASK_S)
                ray_member.actor = await in_thread(
                    lambda: (
                        ray.remote(MemberActor)
                        .options(
                            **needs.options,
                            name=f"{member.name}.{entropy.token_hex(4)}",
                            namespace=self._namespace,
                            lifetime="detached" if context.outlives else None,
                            max_restarts=0,
                            scheduling_strategy=strategy_of(member.role, ray_member.bundle),
                        )
                        .remote()
                    ),
                    _ASK_S,
                    late=ray.kill,
                )
        except (TimeoutError, RayError, ValueError) as error:
            self._forget(member.name, ray_member)
            if isinstance(error, TimeoutError):
                self._set_control_service_state(is_up=False)
            await self._release_group(view)
            raise NotStarted(f"no actor can be created: {self.trouble or error}") from error
        except BaseException:
            self._forget(member.name, ray_member)
            raise
        if ray_member.forgotten.is_set():  # it was stopped before it had an actor
            await self._kill(ray_member.actor)
            return
        num_ranks = len(ray_member.bundle.indices) if ray_member.bundle else 1
        where = f"a node{needs}" if num_ranks == 1 else f"room{needs} for each of {num_ranks} ranks"
        context.watcher.progress(member.name, f"waiting for {where}", 0.0)
        request = StartRequest(
            member,
            fleet,
            self._namespace,
            context.make_recipe,
            ray_member.number,
            needs,
            context.token,
            ray_member.bundle,
        )
        self._tasks.start(self._supervise(ray_member, request, where))
        self.changed.set()

    async def stop(self, name: str, grace_s: float) -> None:
        """Ask the actor to end the member, and end the actor, whether it answers or not."""
        member = self._members.get(name)
        if member is None or not self._may_act:
            return
        if member.has_begun and not member.is_lost:
            ended = reply_future(member.actor.stop.remote(grace_s))
            forgotten = asyncio.create_task(member.forgotten.wait())
            timeout_s = grace_s + self.kill_timeout_s if grace_s else self.hurried_s
            try:
                await asyncio.wait([ended, forgotten], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                forgotten.cancel()
        if not member.forgotten.is_set():
            self._forget(name, member)
            if member.actor is not None:
                await self._kill(member.actor)
            await self._release_group(member.view)

    async def assign(self, name: str, role: MemberRole) -> None:
        """Record a member's role, also with its actor, for later controllers."""
        member = self._members.get(name)
        if member is None:
            return
        member.assigned = role
        member.view = replace(member.view, role=role)
        self.changed.set()
        if not member.is_lost and member.actor is not None:
            with suppress(TimeoutError, RayError):
                await result_of(member.actor.assign.remote(role), _ASK_S)

    async def close(self) -> None:
        """End the remaining members, unless they outlive this process."""
        if not self._is_connected:
            return
        if self.context.outlives:
            await self._wait_until_begun()
        else:
            await asyncio.gather(*(self.stop(name, 0.0) for name in [*self._members]))
        await self._tasks.close()
        if self.leadership is not None:
            await self.leadership.release()
        self._is_connected = False
        await RayConnection.close()
        self.hangs = RayConnection.hangs  # without its control service, it ends neither its connection nor its threads

    # Starting.

    @property
    def _may_act(self) -> bool:
        return self.leadership is None or self.leadership.is_held

    @property
    def _namespace(self) -> str:
        return f"kvferry-{self._fleet.name}{self._own}"

    def _free_number(self) -> int:
        used = {member.number for member in self._members.values()}
        return next(number for number in range(len(used) + 1) if number not in used)

    async def _bundle(self, member: MemberSpec) -> Bundle:
        async with self._grouping:
            key, fleet, outlives = _group_key(member), self._fleet, self.context.outlives
            if key not in self._groups:
                name = f"{self._namespace}/{key}.{entropy.token_hex(4)}"
                self._groups[key] = await in_thread(
                    lambda: make_group(fleet, member.role, name, outlives=outlives),
                    _ASK_S,
                    late=lambda made: remove_placement_group(made[0]),
                )
            group, roles = self._groups[key]
            bundles = [
                member.bundle for member in self._members.values() if member.bundle and _group_key(member.view) == key
            ]
            number = num_actors(fleet, member.role)
            indices = free_indices(
                roles, member.role, number, [index for bundle in bundles for index in bundle.indices]
            )
            if len(indices) < number:
                raise NotStarted(f"{key} has no place for one more {member.role}")
            bundle = Bundle(group, indices, roles)
            self._members[member.name].bundle = bundle
            return bundle

    async def _supervise(self, member: RayMember, request: StartRequest | None, where: str) -> None:
        """Have the actor start its member, and receive its updates, until it is no more."""
        try:
            if request is not None:
                await self._begin_member(member, request, where)
            failing_since: float | None = None
            while not member.forgotten.is_set():
                try:
                    self._on_update(member, await result_of(member.actor.next_update.remote(member.last_update), None))
                    failing_since = None
                except ActorUnavailableError:
                    now, url = SYSTEM_CLOCK.monotonic(), member.view.health_url
                    failing_since = now if failing_since is None else failing_since
                    if not url or await ask_health(url, _RETRY_INTERVAL_S):
                        failing_since = None
                    elif now - failing_since > self.gone_s:
                        raise
                    await asyncio.sleep(_RETRY_INTERVAL_S)
        except ActorUnavailableError:
            self._member_gone(
                member, f"neither it nor its actor can be reached for {self.gone_s:g} s; its node may be lost"
            )
        except (RayError, TimeoutError) as error:
            self._member_gone(member, _why(error))
        except Exception as error:
            # Any error in a reply of one actor ends only the supervision of this actor.
            logger.exception("what the actor of %s answers is not understood", member.view.name)
            self._member_gone(member, f"its actor answers {type(error).__name__}: {error}")

    async def _begin_member(self, member: RayMember, request: StartRequest, where: str) -> None:
        begun = reply_future(member.actor.begin.remote(request))
        timeout_s = 0.9 * seconds(request.fleet.failure.start)  # so that this reason is given, and not the loop's own
        await asyncio.wait([begun], timeout=timeout_s)
        if not begun.done():
            raise TimeoutError(f"Ray has not found {where} in {timeout_s:.0f} s")
        member.begun.set()
        begun.result()
        member.has_begun = True

    def _on_update(self, member: RayMember, update: MemberUpdate) -> None:
        name, watcher, before = member.view.name, self.context.watcher, member.view
        member.last_update = update.number
        for event in update.events:
            match event:
                case LogLine(text):
                    watcher.line(name, text)
                case MemberProgress(what, fraction):
                    watcher.progress(name, what, fraction)
        seen = replace(update.member, role=member.assigned or update.member.role)  # it may not know yet
        if seen != before:
            member.view = seen
            if update.member.state is MemberState.SERVING is not before.state:
                watcher.ready(name, update.member.url)
            self.changed.set()

    def _member_gone(self, member: RayMember, reason: str) -> None:
        member.is_lost = True
        member.begun.set()
        if member.view.state is not MemberState.ENDED:
            member.view = replace(member.view, state=MemberState.ENDED, url="", reason=reason)
        self.changed.set()

    async def _wait_until_begun(self) -> None:
        """Wait until all actors have their orders, which they would never get otherwise."""
        begun = [asyncio.create_task(member.begun.wait()) for member in self._members.values()]
        if begun:
            await asyncio.wait(begun, timeout=_ASK_S)
        for task in begun:
            task.cancel()

    # Ending.

    def _forget(self, name: str, member: RayMember) -> None:
        member.forgotten.set()
        if self._members.get(name) is member:
            del self._members[name]
        self.changed.set()

    async def _kill(self, actor: Any) -> None:
        """End an actor, and with it what it owns; later, if Ray's control service is gone."""
        if self.trouble:
            self._to_kill.append(actor)
            return
        try:
            await in_thread(lambda: ray.kill(actor), _ASK_S)
        except (TimeoutError, RayError) as error:
            logger.warning("an actor cannot be ended yet: %s", _why(error))
            self._to_kill.append(actor)
            if isinstance(error, TimeoutError):
                self._set_control_service_state(is_up=False)

    async def _release_group(self, member: Member) -> None:
        """Release the placement group of a member that is gone, if no other member is in it."""
        key = _group_key(member)
        if key in self._groups and not any(_group_key(member.view) == key for member in self._members.values()):
            group, _ = self._groups.pop(key)
            with suppress(TimeoutError, RayError):
                await in_thread(lambda: remove_placement_group(group), _ASK_S)

    # Adoption of an earlier controller's members.

    def _find_names(self) -> list[str]:
        actors = list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == self._namespace]

    async def _find(self, name: str, at_once: asyncio.Semaphore) -> None:
        """Adopt an actor. An actor without a request is ended; a silent one is adopted when it answers, or ended after
        `silent_s`."""
        try:
            async with at_once:
                actor = await in_thread(lambda: ray.get_actor(name, self._namespace), _ASK_S)
        except ValueError:
            return  # it has just ended
        nonce = entropy.token_hex(16)
        identity = reply_future(actor.who.remote(nonce))
        await asyncio.wait([identity], timeout=_ASK_S)
        if identity.done():
            with suppress(RayError):
                await self._adopt(name, actor, nonce, identity.result())
        else:
            logger.warning("the actor %s does not answer", name)
            self._tasks.start(self._adopt_later(name, actor, nonce, identity))

    async def _adopt_later(self, name: str, actor: Any, nonce: str, identity: asyncio.Future[Any]) -> None:
        """Adopt it when it answers, or end it: its member has been replaced, and must not continue unmanaged,
        especially a router, to which no instance would be declared any more."""
        await asyncio.wait([identity], timeout=self.silent_s)
        if not identity.done():
            logger.warning("the actor %s has not answered for %g s, and is ended", name, self.silent_s + _ASK_S)
            await self._kill(actor)
            return
        with suppress(RayError, ConfigError):
            await self._adopt(name, actor, nonce, identity.result())

    async def _adopt(self, name: str, actor: Any, nonce: str, who: ActorIdentity | None) -> None:
        """Adopt a member. Raises `ConfigError` for an actor with another token."""
        if who is None:
            await self._kill(actor)
            return
        try:
            Signer(self.context.token, nonce, who.answer)
        except AuthenticationFailed as error:
            raise ConfigError(f"the actor {name} of a fleet {self._fleet.name} is another's: {error}") from error
        view = who.update.member
        if view.name in self._members:  # it did not answer, and another actor has its name now
            await self._kill(actor)
            return
        member = self._members[view.name] = RayMember(actor, view, who.number, who.bundle)
        member.has_begun, member.last_update = True, who.update.number
        member.begun.set()
        if who.bundle is not None:
            self._groups[_group_key(view)] = who.bundle.group, who.bundle.roles
        self._tasks.start(self._supervise(member, None, ""))
        self.changed.set()

    def _remove_unused_groups(self) -> None:
        """Remove placement groups without actors, which a controller that died may have left."""
        used = {group.id.hex() for group, _ in self._groups.values()}
        for identity, group in placement_group_table().items():
            is_own_group = group["name"].startswith(f"{self._namespace}/") and group["state"] != "REMOVED"
            if is_own_group and identity not in used:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity))))

    # Ray itself.

    async def _watch_control_service(self) -> None:
        """Report when Ray's control service is gone, and when it is back. Without it members continue, and none is
        started; actors that could not be ended are ended when it is back."""
        while True:
            await asyncio.sleep(self.poll_interval_s)
            try:
                await in_thread(ray.nodes, _ASK_S)
            except (TimeoutError, RayError):
                self._set_control_service_state(is_up=False)
                continue
            self._set_control_service_state(is_up=True)
            left, self._to_kill = self._to_kill, []
            for actor in left:
                await self._kill(actor)

    def _set_control_service_state(self, *, is_up: bool) -> None:
        if is_up is not bool(self.trouble):
            return
        self.trouble = "" if is_up else _NO_SERVICE
        text = f"{_SERVICE} answers again" if is_up else _NO_SERVICE
        logger.warning("%s", text)
        self.context.watcher.line("ray", text)
        self.changed.set()


def _require_ranks(fleet: DesiredFleet) -> None:
    """Raise `ConfigError` for `ranks` of a role whose ranks cannot be on several nodes."""
    for role, actor_spec in fleet.backend.ray.items():
        where = f"backend.ray.{role}.ranks"
        if actor_spec.ranks == "same-host":
            continue
        if fleet.engine.kind != "kvferry":
            raise ConfigError(f"{where}: {_ON_ONE_NODE}; leave it out")
        if role == "router":
            raise ConfigError(f"{where}: a router has no ranks; leave it out")
        if role not in fleet.role or fleet.role[role].tensor_parallel_size == 1:
            raise ConfigError(f"{where}: there is one rank; set role.{role}.tensor_parallel_size, or leave it out")


def _group_key(member: Member | MemberSpec) -> str:
    """The key of the placement group that a member is in, if it is in one."""
    return member.unit or member.name


def _why(error: Exception) -> str:
    """The reason why a member is gone, in few words."""
    text = str(error)
    if not isinstance(error, ActorDiedError):
        return text.strip().splitlines()[-1] if text.strip() else type(error).__name__
    if "node" in text and "worker process has died" not in text:
        return "its node was lost"
    if "creation task" in text:
        return f"its actor cannot start: {text.strip().splitlines()[-1]}"
    return "its actor was killed"
