"""Requests to change the instances, over HTTP: of operators only, also where nothing else needs a key."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.core.messages.traffic import FleetPlan
from kvferry.http.errors import Unauthorized
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Handler, Route
from kvferry.router.instances.instance import BOOTSTRAP_PORT, Instance, LegRole
from kvferry.router.instances.membership import Declared, Membership

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


class DeclaredInstance(msgspec.Struct, forbid_unknown_fields=True):
    """One instance of a fleet. `unit`: it hands off to, and takes from, instances of that unit only."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    role: LegRole
    url: Text
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    unit: Annotated[str, msgspec.Meta(max_length=128)] = ""
    draining: bool = False


class Declaration(msgspec.Struct, forbid_unknown_fields=True):
    """PUT /kvferry/instances: all instances of a fleet, and what it is to be. Without `instances`, only the latter is
    told: somebody else starts them."""

    instances: Annotated[list[DeclaredInstance], msgspec.Meta(max_length=MAX_DECLARED)] | None = None
    plan: FleetPlan | None = None


class ChangeRole(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/role."""

    instance: Text
    role: LegRole


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class Admin:
    """The routes that change which instances there are."""

    def __init__(self, membership: Membership, show: Handler) -> None:
        """`show` answers with all instances."""
        self._membership, self._show = membership, show

    def routes(self) -> list[Route]:
        """Served beside the router's other routes."""
        handlers = {"add": self.add, "drain": self.drain, "remove": self.remove, "role": self.change_role}
        changes = [Route("POST", f"{INSTANCES_PATH}/{name}", one, "operate") for name, one in handlers.items()]
        return [Route("PUT", INSTANCES_PATH, self.declare, "operate"), *changes]

    async def declare(self, request: HttpRequest, response: Response) -> None:
        """The instances of a fleet, all of them. May be repeated; answers as GET does."""
        asked = await self._read(request, Declaration, _MAX_DECLARATION)
        plan = "" if asked.plan is None else msgspec.json.encode(asked.plan).decode()
        try:
            if asked.instances is None:
                self._membership.take_plan(plan)
            else:
                self._membership.declare([Declared(**msgspec.structs.asdict(one)) for one in asked.instances], plan)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="instances") from error
        await self._show(request, response)

    async def add(self, request: HttpRequest, response: Response) -> None:
        """Add an instance."""
        asked = await self._read(request, Add)
        try:
            instance = self._membership.add(asked.role, asked.url, asked.bootstrap_port)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="url") from error
        self._answer(response, instance)

    async def drain(self, request: HttpRequest, response: Response) -> None:
        """Send an instance no new requests. Operators ask again to see whether it is drained."""
        self._answer(response, self._membership.drain((await self._read(request, Named)).instance))

    async def remove(self, request: HttpRequest, response: Response) -> None:
        """Remove an instance."""
        asked = await self._read(request, Remove)
        self._answer(response, self._membership.remove(asked.instance, force=asked.force))

    async def change_role(self, request: HttpRequest, response: Response) -> None:
        """Give an instance another role."""
        asked = await self._read(request, ChangeRole)
        self._answer(response, self._membership.change_role(asked.instance, asked.role))

    def _answer(self, response: Response, instance: Instance) -> None:
        shown = {"name": instance.name, "role": instance.role, "url": instance.url, **view_of_state(instance)}
        response.send_json(msgspec.json.encode(shown))

    async def _read(self, request: HttpRequest, kind: type[BodyT], longest: int = _MAX_BODY) -> BodyT:
        """The body of a request whose sender may do this. Raises `Unauthorized` and `InvalidRequest`."""
        if not request.caller.is_operator:
            raise Unauthorized("This needs an operator: an admin key, or a request that `kvferry fleet` has signed")
        body = await request.body.read()
        if len(body) > longest:
            raise InvalidRequest(f"the body has {len(body)} bytes; at most {longest} are read here")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error


def view_of_state(instance: Instance) -> dict[str, Any]:
    """An instance's state, for operators who follow a change."""
    return {"draining": instance.draining, "drained": instance.drained}
