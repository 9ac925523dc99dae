"""`kvferry fleet …`: shows and changes the instances behind a running router, while it serves."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Literal, TypeVar

import msgspec
from cyclopts import App, Parameter

from kvferry.cli import completion
from kvferry.cli.fleet.controllers import control
from kvferry.cli.fleet.life import COMMANDS
from kvferry.cli.router_address import RouterAddress
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError, PeerLost
from kvferry.core.keys import http_secret
from kvferry.core.runtime.threads import run_async
from kvferry.core.settings.bounds import PORT, SECONDS_OR_ZERO
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.tls import client_context

Role = Literal["prefill", "decode"]

_PATH = "/kvferry/instances"
_ASK_S = 10.0
_POLL_INTERVAL_S = 0.5
_KEY = (
    "this needs an operator: set KVFERRY_AUTH_TOKEN to the router's, or give --admin-key; if the router has"
    " neither, the user who started the router is its operator, on that machine"
)


class _Member(msgspec.Struct):
    name: str
    in_flight: int
    alive: bool
    draining: bool
    drained: bool
    engine: str | None = None
    url: str = "(its address is only shown to operators)"


class _ErrorDetail(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorDetail


class _Listed(msgspec.Struct):
    instances: list[_Member]


class _Changed(msgspec.Struct):
    """A router's answer about an instance that it has changed."""

    name: str
    url: str
    drained: bool = False


Answer = TypeVar("Answer")


class _NotThere(ConfigError):
    """The router has no such instance."""


app = App(
    name="fleet",
    help="Make a fleet from a spec and change it while it serves; or show and change the instances behind a router.",
    sort_key=7,
)
for _command in COMMANDS:
    app.command(_command, show=_command is not control)


WhereFlags = Annotated[RouterAddress, Parameter(name="*")]
_HERE = RouterAddress()
RoleArgument = Annotated[Role, Parameter(help="The role in which the router uses the instance.")]
Name = Annotated[
    str, Parameter(help="An instance's name or URL, as in `kvferry fleet list`.", completer=completion.instances)
]


@app.command(name="list")
def show(*, where: WhereFlags = _HERE) -> int:
    """Show all instances, with the number of requests running there."""
    instances = ask(where, "GET", _PATH, _Listed).instances
    if not instances:
        sys.stderr.write("kvferry: the router has no instances\n")
    for instance in instances:
        state = (
            "drained" if instance.drained else "draining" if instance.draining else "up" if instance.alive else "down"
        )
        sys.stdout.write(
            f"{instance.name:<14} {state:<9} {instance.in_flight:>5} running  {instance.engine or '?':<8}"
            f" {instance.url}\n"
        )
    return 0


@app.command
def add(
    role: RoleArgument,
    url: Annotated[str, Parameter(help="Base URL of the instance, such as http://10.0.0.3:8000.")],
    *,
    bootstrap_port: Annotated[
        int | None, Parameter(help="Port of a prefill instance's bootstrap server (Mooncake's in vLLM, SGLang's).")
    ] = None,
    where: WhereFlags = _HERE,
) -> int:
    """Add an instance that is running: `kvferry fleet add decode http://10.0.0.3:8000`."""
    if bootstrap_port is not None:
        PORT.require("--bootstrap-port", bootstrap_port)
    fields = {} if bootstrap_port is None else {"bootstrap_port": bootstrap_port}
    return _print_change(ask(where, "POST", f"{_PATH}/add", _Changed, {"role": role, "url": url, **fields}), "added")


@app.command
def drain(
    instance: Name,
    *,
    wait_s: Annotated[float, Parameter(help="Seconds to wait until the instance is drained.")] = 0.0,
    where: WhereFlags = _HERE,
) -> int:
    """Send an instance no new requests. With --wait-s, wait until it has no running requests and no open tickets; exit
    code 1 if that takes longer."""
    SECONDS_OR_ZERO.require("--wait-s", wait_s)
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    answer = ask(where, "POST", f"{_PATH}/drain", _Changed, {"instance": instance})
    while not answer.drained and SYSTEM_CLOCK.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        try:
            answer = ask(where, "POST", f"{_PATH}/drain", _Changed, {"instance": answer.name})
        except _NotThere:
            answer.drained = True  # the router forgets an instance that leaves by itself as soon as it is drained
    _print_change(answer, "drained" if answer.drained else "draining")
    return 0 if answer.drained or not wait_s else 1


@app.command
def remove(
    instance: Name,
    *,
    force: Annotated[bool, Parameter(help="Remove it even if it is not drained.")] = False,
    where: WhereFlags = _HERE,
) -> int:
    """Remove a drained instance; with --force, also one that is not drained."""
    return _print_change(
        ask(where, "POST", f"{_PATH}/remove", _Changed, {"instance": instance, "force": force}), "removed"
    )


@app.command(name="role")
def change_role(instance: Name, role: RoleArgument, *, where: WhereFlags = _HERE) -> int:
    """Make an instance that can do both prefill instead of decode, or the other way round."""
    return _print_change(ask(where, "POST", f"{_PATH}/role", _Changed, {"instance": instance, "role": role}), "changed")


def _print_change(answer: _Changed, action: str) -> int:
    sys.stdout.write(f"{answer.name} ({answer.url}): {action}\n")
    return 0


def ask(where: RouterAddress, method: str, path: str, answer_type: type[Answer], body: object = None) -> Answer:
    """The router's answer. Raises `PeerLost` if it does not answer, `ConfigError` if the answer is an error, or not a
    router's."""
    router = Origin.parse(where.router, "--router")
    try:
        status, content = run_async(_exchange(router, where, method, path, body))
    except ConfigError:
        raise
    except KvferryError as error:
        raise PeerLost(f"the router at {router} did not answer: {error}") from error
    except ValueError as error:
        raise ConfigError(f"the router at {router} cannot be asked: {error}") from error
    if status != 200:
        kind = _NotThere if status == 404 else ConfigError
        raise kind(f"the router answered {status}: {_KEY if status == 401 else _message(content)}")
    try:
        return msgspec.json.decode(content, type=answer_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"what answers at {router} is no router of kvferry's: {error}") from error


def _message(content: bytes) -> str:
    """The message of an error."""
    try:
        return msgspec.json.decode(content, type=_Error).error.message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return repr(content[:200].decode(errors="replace"))


async def _exchange(router: Origin, where: RouterAddress, method: str, path: str, body: object) -> tuple[int, bytes]:
    sent = None if body is None else msgspec.json.encode(body)
    tls = client_context(where.tls_ca) if router.tls else None
    key = where.admin_key
    async with HttpClient(tls=tls, client_name="this command") as http:
        client = SignedClient(http, http_secret([key] if key else []), key)
        status, _, content = await client.ask(router, method, path, purpose="operate", timeout_s=_ASK_S, body=sent)
    return status, content
