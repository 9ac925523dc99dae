"""HTTP requests that change the instances: for operators only, even if nothing else requires a key."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.core.messages.traffic import FleetPlan
from kvferry.core.peer_message import PeerMessage
from kvferry.http.errors import Unauthorized
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Handler, Route
from kvferry.router.instances.instance import BOOTSTRAP_PORT, Instance, LegRole
from kvferry.router.instances.membership import InstanceDeclaration, Membership

INSTANCES_PATH = "/kvferry/instances"

_MAX_BODY = 64 * 1024
MAX_DECLARED = 4096
_MAX_DECLARATION = MAX_DECLARED * 4096

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class Add(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/add."""

    role: LegRole
    url: Text
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = BOOTSTRAP_PORT


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/drain: an instance, by its name or URL."""

    instance: Text


class Remove(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/remove. `force`: even if it is not drained."""

    instance: Text
    force: bool = False


class DeclaredInstance(PeerMessage, frozen=True):
    """An instance of a fleet. `unit`: it hands off within this unit only; `revision` names its settings."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    role: LegRole
    url: Text
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    unit: Annotated[str, msgspec.Meta(max_length=128)] = ""
    revision: Annotated[str, msgspec.Meta(max_length=128)] = ""
    draining: bool = False


class Declaration(PeerMessage, frozen=True):
    """PUT /kvferry/instances: all instances of a fleet, and its plan. Without `instances`, only the plan is replaced,
    as another controller starts the instances."""

    instances: Annotated[list[DeclaredInstance], msgspec.Meta(max_length=MAX_DECLARED)] | None = None
    plan: FleetPlan | None = None


class ChangeRole(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/role."""

    instance: Text
    role: LegRole


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class Admin:
    """The routes that change the instances."""

    def __init__(self, membership: Membership, show: Handler) -> None:
        """`show` answers with all instances."""
        self._membership, self._show = membership, show

    def routes(self) -> list[Route]:
        """The routes for operators."""
        handlers = {"add": self.add, "drain": self.drain, "remove": self.remove, "role": self.change_role}
        changes = [Route("POST", f"{INSTANCES_PATH}/{name}", handler, "operate") for name, handler in handlers.items()]
        return [Route("PUT", INSTANCES_PATH, self.declare, "operate"), *changes]

    async def declare(self, request: HttpRequest, response: Response) -> None:
        """Replace all instances of a fleet. Idempotent; answers as GET does."""
        declaration = await self._read(request, Declaration, _MAX_DECLARATION)
        plan = "" if declaration.plan is None else msgspec.json.encode(declaration.plan).decode()
        try:
            if declaration.instances is None:
                self._membership.set_plan(plan)
            else:
                self._membership.declare(
                    [InstanceDeclaration(**msgspec.structs.asdict(declared)) for declared in declaration.instances],
                    plan,
                )
        except ConfigError as error:
            raise InvalidRequest(str(error), param="instances") from error
        await self._show(request, response)

    async def add(self, request: HttpRequest, response: Response) -> None:
        """Add an instance."""
        change = await self._read(request, Add)
        try:
            instance = self._membership.add(change.role, change.url, change.bootstrap_port)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="url") from error
        self._answer(response, instance)

    async def drain(self, request: HttpRequest, response: Response) -> None:
        """Send an instance no new requests. Operators repeat the request to see whether it is drained."""
        self._answer(response, self._membership.drain((await self._read(request, Named)).instance))

    async def remove(self, request: HttpRequest, response: Response) -> None:
        """Remove an instance."""
        change = await self._read(request, Remove)
        self._answer(response, self._membership.remove(change.instance, force=change.force))

    async def change_role(self, request: HttpRequest, response: Response) -> None:
        """Give an instance another role."""
        change = await self._read(request, ChangeRole)
        self._answer(response, self._membership.change_role(change.instance, change.role))

    def _answer(self, response: Response, instance: Instance) -> None:
        shown = {"name": instance.name, "role": instance.role, "url": instance.url, **view_of_state(instance)}
        response.send_json(msgspec.json.encode(shown))

    async def _read(self, request: HttpRequest, kind: type[BodyT], max_bytes: int = _MAX_BODY) -> BodyT:
        """Read the body of an operator's request. Raises `Unauthorized` and `InvalidRequest`."""
        if not request.caller.is_operator:
            raise Unauthorized("This needs an operator: an admin key, or a request that `kvferry fleet` has signed")
        body = await request.body.read()
        if len(body) > max_bytes:
            raise InvalidRequest(f"the body has {len(body)} bytes; at most {max_bytes} are read here")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error


def view_of_state(instance: Instance) -> dict[str, Any]:
    """An instance's state, for operators who follow a change."""
    return {"draining": instance.draining, "drained": instance.drained}
