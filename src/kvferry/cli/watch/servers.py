"""Requests of commands that read the state of a router, or of a single instance, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError, KvferryError, ProtocolError
from kvferry.core.keys import http_secret
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.tls import client_context

CHECK_PATH, INSTANCES_PATH = "/kvferry/check", "/kvferry/instances"
_ASK_S = 5.0


class InstanceView(msgspec.Struct):
    """An instance as a router shows it; its URL is for operators only."""

    name: str
    role: str = "both"
    state: str = ""
    alive: bool = True
    in_flight: int = 0
    engine: str | None = None
    no_hand_off: str = ""
    url: str = ""


@dataclass(frozen=True)
class CheckResult:
    """The result of an instance's own check. `problem`: the problem that it found, or the reason why there is no
    result; empty: no problem."""

    instance: InstanceView
    problem: str = ""
    is_checked: bool = True
    """False if the engine has no such check, or this client may not call it."""


class _Listed(msgspec.Struct):
    instances: list[InstanceView]


class Servers:
    """Sends requests to the servers of one deployment, as its operator. A context manager."""

    max_reason = 300
    max_bytes = 4 * 2**20

    def __init__(self, tls_ca: Path | None = None, admin_key: str | None = None) -> None:
        tls = client_context(tls_ca)
        self._http = HttpClient(tls=tls, client_name="this command")
        self._client = SignedClient(self._http, http_secret([admin_key] if admin_key else []), admin_key)

    async def __aenter__(self) -> Servers:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    async def get(self, url: str, path: str, timeout_s: float = _ASK_S) -> tuple[int, bytes]:
        """The status and the body. Raises `KvferryError`."""
        status, _, body = await self._client.ask(
            Origin.parse(url), "GET", path, purpose="operate", timeout_s=timeout_s, max_bytes=self.max_bytes
        )
        return status, body

    async def json(self, url: str, path: str, timeout_s: float = _ASK_S) -> Any:
        """The JSON at a path. Raises `KvferryError`."""
        status, body = await self.get(url, path, timeout_s)
        if status in (401, 403):
            raise ConfigError(f"{url} needs its admin key: add --admin-key KEY, or set KVFERRY_ADMIN_KEY")
        if status != 200:
            raise ProtocolError(f"{url} answers {status} to GET {path}")
        try:
            return msgspec.json.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"{url}{path} is not JSON") from error

    async def instances(self, url: str) -> list[InstanceView]:
        """The instances behind a router. For a single instance, the instance itself. Raises `KvferryError`."""
        status, _ = await self.get(url, INSTANCES_PATH)
        if status == 404:
            return [InstanceView("instance", url=url, state="up")]
        try:
            return msgspec.convert(await self.json(url, INSTANCES_PATH), _Listed).instances
        except msgspec.ValidationError as error:
            raise ProtocolError(f"what answers at {url} is no router of kvferry's: {error}") from error

    async def check_all(self, instances: Sequence[InstanceView]) -> list[CheckResult]:
        """The results of the checks of all these instances."""
        return list(await asyncio.gather(*(self.check(instance) for instance in instances)))

    async def check(self, instance: InstanceView) -> CheckResult:
        """Result of an instance's own check for blocks, leases and transfers without an owner."""
        if not instance.alive:
            return CheckResult(instance, f"it is {instance.state or 'down'}")
        if not instance.url or instance.engine not in ("kvferry", None):
            return CheckResult(instance, is_checked=False)
        try:
            status, body = await self.get(instance.url, CHECK_PATH)
        except KvferryError as error:
            return CheckResult(instance, str(error))
        if status in (401, 403, 404):
            return CheckResult(instance, is_checked=False)
        return CheckResult(instance, "" if status == 200 else body[: self.max_reason].decode(errors="replace"))
