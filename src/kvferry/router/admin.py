"""Operators' requests to change the instances, over HTTP. An admin key, or the fleet's own, is needed in any case."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.http.headers import find_header
from kvferry.http.keys import Access, Guard
from kvferry.http.request import Request
from kvferry.http.response import Response
from kvferry.http.routes import Route
from kvferry.router.instance import BOOTSTRAP_PORT, Instance, LegRole
from kvferry.router.membership import Membership

INSTANCES_PATH = "/kvferry/instances"

_LONGEST_BODY = 64 * 1024

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class Add(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/add."""

    role: LegRole
    url: Text
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = BOOTSTRAP_PORT


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/drain: an instance by its name or URL."""

    instance: Text


class Remove(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/remove. `force`: though it is not drained."""

    instance: Text
    force: bool = False


class ChangeRole(msgspec.Struct, forbid_unknown_fields=True):
    """POST /kvferry/instances/role."""

    instance: Text
    role: LegRole


Asked = TypeVar("Asked", bound=msgspec.Struct)


class Admin:
    """The routes that change which instances there are."""

    def __init__(self, membership: Membership, operators: Guard) -> None:
        self._membership, self._operators = membership, operators

    def routes(self) -> list[Route]:
        """To be served beside the router's own."""
        handlers = {"add": self.add, "drain": self.drain, "remove": self.remove, "role": self.change_role}
        return [Route("POST", f"{INSTANCES_PATH}/{name}", one, Access.ADMIN) for name, one in handlers.items()]

    async def add(self, request: Request, response: Response) -> None:
        """One more instance."""
        asked = await self._read(request, Add)
        try:
            instance = self._membership.add(asked.role, asked.url, asked.bootstrap_port)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="url") from error
        _answer(response, instance)

    async def drain(self, request: Request, response: Response) -> None:
        """No new requests for it; ask again to see whether it is drained."""
        _answer(response, self._membership.drain((await self._read(request, Named)).instance))

    async def remove(self, request: Request, response: Response) -> None:
        """Forget it."""
        asked = await self._read(request, Remove)
        _answer(response, self._membership.remove(asked.instance, force=asked.force))

    async def change_role(self, request: Request, response: Response) -> None:
        """It takes other requests from now on."""
        asked = await self._read(request, ChangeRole)
        _answer(response, self._membership.change_role(asked.instance, asked.role))

    async def _read(self, request: Request, kind: type[Asked]) -> Asked:
        """The body, of someone who may. Raises `Unauthorized` and `InvalidRequest`."""
        key = find_header(request.headers, b"authorization")
        self._operators.check(Access.ADMIN, "all", key, request.path)
        body = await request.body.read()
        if len(body) > _LONGEST_BODY:
            raise InvalidRequest(f"the body has {len(body)} bytes; at most {_LONGEST_BODY} are read here")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error


def view_of_state(instance: Instance) -> dict[str, Any]:
    """What operators follow while instances come and go."""
    return {"draining": instance.draining, "drained": instance.drained}


def _answer(response: Response, instance: Instance) -> None:
    shown = {"name": instance.name, "role": instance.role, "url": instance.url, **view_of_state(instance)}
    response.send_json(msgspec.json.encode(shown))
