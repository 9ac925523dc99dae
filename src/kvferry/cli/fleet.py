"""`kvferry fleet …`: which instances are behind a running router, changed while it serves."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.fleet.local import TOKEN_VARIABLE
from kvferry.http.client import HttpClient
from kvferry.http.headers import RawHeaders
from kvferry.http.keys import bearer, fleet_key
from kvferry.http.origin import Origin
from kvferry.http.tls import client_context

Role = Literal["prefill", "decode"]

_PATH = "/kvferry/instances"
_ASK_S = 10.0
_LOOK_AGAIN_S = 0.5


class _NotThere(ConfigError):
    """The router knows no such instance."""


app = App(name="fleet", help="See and change the instances behind a running router.", sort_key=6)


@dataclass(frozen=True, kw_only=True)
class Where:
    """The router, and the key that opens it."""

    router: str = "http://127.0.0.1:8000"
    """URL of the router; with --admin-port, of its admin listener."""

    admin_key: str | None = None
    """Admin key of the router. Without one, the key that goes with KVFERRY_AUTH_TOKEN."""

    router_ca: Path | None = None
    """Authority (PEM) that vouches for a router at https://; the system's authorities when not given."""


WhereFlags = Annotated[Where, Parameter(name="*")]
_HERE = Where()
RoleArgument = Annotated[Role, Parameter(help="What the router is to use the instance for.")]
Name = Annotated[str, Parameter(help="An instance's name or URL, as in `kvferry fleet list`.")]


@app.command(name="list")
def show(*, where: WhereFlags = _HERE) -> int:
    """Show all instances, with what runs there."""
    answer = ask(where, "GET", _PATH)
    for one in answer["instances"]:
        state = "drained" if one["drained"] else "draining" if one["draining"] else "up" if one["alive"] else "down"
        engine, url = one["engine"] or "?", one.get("url", "(its address is for operators)")
        sys.stdout.write(f"{one['name']:<14} {state:<9} {one['in_flight']:>5} running  {engine:<8} {url}\n")
    return 0


@app.command
def add(
    role: RoleArgument,
    url: Annotated[str, Parameter(help="Base URL of the instance, such as http://10.0.0.3:8000.")],
    *,
    bootstrap_port: Annotated[
        int | None, Parameter(help="Port of a prefill instance's Mooncake bootstrap server.")
    ] = None,
    where: WhereFlags = _HERE,
) -> int:
    """Add an instance that is running: `kvferry fleet add decode http://10.0.0.3:8000`."""
    more = {} if bootstrap_port is None else {"bootstrap_port": bootstrap_port}
    return _told(ask(where, "POST", f"{_PATH}/add", {"role": role, "url": url, **more}), "added")


@app.command
def drain(
    instance: Name,
    *,
    wait_s: Annotated[float, Parameter(help="Seconds to wait until the instance is drained.")] = 0.0,
    where: WhereFlags = _HERE,
) -> int:
    """Give an instance no new requests. With --wait-s, wait until nothing runs there and nothing is kept for others;
    exit code 1 when that takes longer."""
    deadline = SYSTEM_CLOCK.monotonic() + wait_s
    answer = ask(where, "POST", f"{_PATH}/drain", {"instance": instance})
    while not answer["drained"] and SYSTEM_CLOCK.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
        try:
            answer = ask(where, "POST", f"{_PATH}/drain", {"instance": answer["name"]})
        except _NotThere:
            answer["drained"] = True  # one that leaves by itself is forgotten as soon as it is drained
    _told(answer, "drained" if answer["drained"] else "draining")
    return 0 if answer["drained"] or not wait_s else 1


@app.command
def remove(
    instance: Name,
    *,
    force: Annotated[bool, Parameter(help="Remove it even if it is not drained.")] = False,
    where: WhereFlags = _HERE,
) -> int:
    """Forget an instance that is drained; with --force, one that is not."""
    return _told(ask(where, "POST", f"{_PATH}/remove", {"instance": instance, "force": force}), "removed")


@app.command(name="role")
def change_role(instance: Name, role: RoleArgument, *, where: WhereFlags = _HERE) -> int:
    """Have an instance that can do both prefill instead of decode, or the other way round."""
    return _told(ask(where, "POST", f"{_PATH}/role", {"instance": instance, "role": role}), "changed")


def _told(answer: dict[str, Any], what: str) -> int:
    sys.stdout.write(f"{answer['name']} ({answer['url']}): {what}\n")
    return 0


def ask(where: Where, method: str, path: str, body: object = None) -> dict[str, Any]:
    """The router's answer. Raises `ConfigError` when there is none, or it says no."""
    try:
        status, content = asyncio.run(_exchange(where, method, path, body))
        answer: dict[str, Any] = msgspec.json.decode(content)
    except (KvferryError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"the router at {where.router} gave no answer: {error}") from error
    if status != 200:
        said = answer.get("error", {}) if isinstance(answer, dict) else {}
        kind = _NotThere if status == 404 else ConfigError
        raise kind(f"the router answered {status}: {said.get('message', content[:200].decode(errors='replace'))}")
    return answer


async def _exchange(where: Where, method: str, path: str, body: object) -> tuple[int, bytes]:
    token = os.environ.get(TOKEN_VARIABLE, "")
    key = where.admin_key or (fleet_key(token) if token else None)
    headers: RawHeaders = [] if key is None else [bearer(key)]
    sent = None if body is None else msgspec.json.encode(body)
    tls = client_context(where.router_ca, "--router-ca") if where.router.startswith("https") else None
    async with HttpClient(tls=tls) as client:
        origin = Origin.parse(where.router.rstrip("/"))
        status, _, content = await client.ask(origin, method, path, timeout_s=_ASK_S, headers=headers, body=sent)
    return status, content
