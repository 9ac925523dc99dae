"""An instance's side of registration: it reports to each router periodically until it leaves.

Owns the last answer of each router. A router that was unreachable, or restarted, gets the report as soon as it answers;
routers do not delay each other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvferry.core import entropy
from kvferry.core.clock import doubling_waits
from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, ProtocolError, Unavailable
from kvferry.core.keys import shared_token
from kvferry.core.messages.registration import (
    REGISTER_PATH,
    Announcement,
    Registered,
    Role,
    State,
)
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.server.http_server import HttpServer, OnListening
from kvferry.http.server.listen import authority
from kvferry.http.tls import client_context

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 10.0
_RENEWALS_PER_LEASE = 3
_MIN_RENEWAL_S, _MAX_RENEWAL_S = 0.05, 60.0
"""Bounds of the wait between two renewals, for any lease of a router."""
_JSON = (b"content-type", b"application/json")
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, kw_only=True)
class RegistrarConfig:
    """The routers to register at, and the values to report. `url` None: built from the server's host and port. `host`
    is for a supervisor that registers a server of another program: the host on which that server listens."""

    routers: tuple[str, ...]
    role: Role
    secret: str = field(repr=False)
    scheme: str = "http"
    url: str | None = None
    ca: Path | None = None
    host: str = ""
    engine_id: str = ""
    bootstrap_port: int | None = None

    def __post_init__(self) -> None:
        for router in self.routers:
            Origin.parse(router.rstrip("/"), "--register")
        _ = self.tls  # an unusable file is an error now, and not after a model is loaded

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for routers at https:// URLs. Its file is read once."""
        if self.ca is None and not any(Origin.parse(router.rstrip("/")).tls for router in self.routers):
            return None
        return client_context(self.ca)


def make_registrar(
    routers: Iterable[str],
    role: Literal["prefill", "decode", "both"],
    *,
    scheme: str = "http",
    url: str | None = None,
    host: str = "",
    ca: Path | None = None,
    bootstrap_port: int | None = None,
) -> RegistrarConfig | None:
    """The registrar for these flags; None if no router is named. Each item may name several routers, separated by
    commas. An instance that does both phases registers for decode, since decode instances can do both. Raises
    `ConfigError`."""
    urls = tuple(name.strip() for item in routers for name in item.split(",") if name.strip())
    if not urls:
        return None
    return RegistrarConfig(
        routers=urls,
        role="prefill" if role == "prefill" else "decode",
        secret=shared_token("--register"),
        scheme=scheme,
        url=url,
        host=host,
        ca=ca,
        bootstrap_port=bootstrap_port,
    )


class Registrar:
    """Registers one instance that listens on `host` and `port`. `serves` returns True if it answers requests at the
    moment; while it does not, leases are not renewed. Call `run` as a task beside the server, and `leave` before the
    process ends."""

    deregister_s = 1.0
    drain_poll_s = 0.25
    """Max interval between two reports while a router drains the instance."""
    max_answer = 64 * 1024

    def __init__(
        self, config: RegistrarConfig, host: str, port: int, serves: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        self._config, self._host, self._port, self._serves = config, host, port, serves
        self._process = entropy.token_hex(16)
        self._state: State = "up"
        self._changed, self._done = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Report to all routers, until `leave` has been called and is done."""
        try:
            async with (
                HttpClient(tls=self._config.tls, client_name="the instance") as http,
                asyncio.TaskGroup() as group,
            ):
                client = SignedClient(http, self._config.secret)
                for router in self._config.routers:
                    group.create_task(self._report_periodically(client, Origin.parse(router.rstrip("/"))))
        finally:
            self._done.set()

    async def leave(self, timeout_s: float) -> bool:
        """Drain and deregister: routers send no more requests; wait until they report that no request is running, or
        are gone. Returns False if that takes longer than `timeout_s`; the instance deregisters nevertheless."""
        self._change("draining")
        if await self._done_within(timeout_s):
            return True
        self._change("gone")
        await self._done_within(self.deregister_s)
        return False

    def _change(self, state: State) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _done_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._done.wait()
        return self._done.is_set()

    async def _report_periodically(self, client: SignedClient, origin: Origin) -> None:
        """Report to one router periodically."""
        router = _Router(origin)
        while True:
            state: State = "gone" if router.drained else self._state
            changed = self._changed
            pause_s = await self._notify(client, router, state)
            if state == "gone" or (state == "draining" and router.lost):
                return
            if not (router.drained and state == "draining"):
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s if state == "up" else self.drain_poll_s):
                        await changed.wait()

    async def _notify(self, client: SignedClient, router: _Router, state: State) -> float:
        """Send one report; returns the seconds until the next one."""
        try:
            if state == "up" and self._serves is not None and not await self._serves():
                raise ProtocolError("the instance does not answer at the moment")
            return router.on_registered(await self._register(client, router, state), self._config.role)
        except Exception as error:  # noqa: BLE001 - an internal error must not end the registration
            return router.on_failure(error)

    async def _register(self, client: SignedClient, router: _Router, state: State) -> Registered:
        config = self._config
        url = config.url or await self._url_for(router)
        if reason := await client.rejection_reason(router.origin, _REQUEST_TIMEOUT_S):
            raise AuthenticationFailed(f"nothing is sent to it: {reason}")
        announcement = Announcement(
            process=self._process,
            url=url,
            role=config.role,
            state=state,
            engine_id=config.engine_id,
            bootstrap_port=config.bootstrap_port,
        )
        status, _, content = await client.ask(
            router.origin,
            "POST",
            REGISTER_PATH,
            purpose="register",
            timeout_s=_REQUEST_TIMEOUT_S,
            headers=[_JSON],
            body=msgspec.json.encode(announcement),
            max_bytes=self.max_answer,
        )
        if status == Unavailable.status:
            raise Unavailable(f"it answered {status}: {_error_message(content)}")
        if status != 200:
            raise ProtocolError(f"it answered {status}: {_error_message(content)}")
        try:
            return msgspec.json.decode(content, type=Registered)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"it answered {status}: {_error_message(content)}") from error

    async def _url_for(self, router: _Router) -> str:
        """The URL at which a router can reach this process, which may listen on all of the machine's addresses."""
        host = self._host
        if host in _WILDCARDS:
            router.address = router.address or await _look_up(router.origin)
            host = _own_address(router.address, router.origin)
        return f"{self._config.scheme}://{authority(host, self._port)}"


class RegisteredServer:
    """A server that is registered at routers. When stopped, it first notifies them, and continues to serve until no
    request is running or the grace period is over. Without `config` it is just the server."""

    def __init__(
        self, server: HttpServer, config: RegistrarConfig | None, serves: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        self._server, self._config, self._serves = server, config, serves
        self._registrar: Registrar | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False

    async def run(self, on_listening: OnListening | None = None) -> None:
        """Run the server."""

        def listening(host: str, port: int) -> None:
            if on_listening is not None:
                on_listening(host, port)
            if self._config is not None:
                self._registrar = Registrar(self._config, host, port, self._serves)
                self._tasks.append(asyncio.create_task(self._registrar.run()))

        try:
            await self._server.run(listening)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def stopping(self) -> bool:
        """True if the shutdown has begun."""
        return self._leaving or self._server.stopping

    def stop(self) -> None:
        """Begin the shutdown."""
        if self._registrar is None:
            self._server.stop()
        elif not self._leaving:
            self._leaving = True
            self._tasks.append(asyncio.create_task(self._leave(self._registrar)))

    def abort(self) -> None:
        """End running requests now."""
        self._server.abort()

    async def _leave(self, registrar: Registrar) -> None:
        drained = await registrar.leave(self._server.config.shutdown_grace_s)
        (self._server.stop if drained else self._server.abort)()


class _Router:
    """One router, and its last answer."""

    retry_waits_s = (0.5, 3.0)
    """The first and the longest wait before a retry at a router that did not answer."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.address: _Address | None = None
        """The router's address, cached while it answers."""
        self.drained = False
        self.lost = False
        """True if the last attempt got no answer, or a refusal."""
        self._last_error: str | None = ""
        self._waits = doubling_waits(*self.retry_waits_s)

    def on_registered(self, answer: Registered, role: Role) -> float:
        """Record the router's answer; returns the seconds until the next report."""
        self.lost, self.drained = False, answer.state == "drained"
        if self._last_error is not None:
            logger.info("registered at %s for %s", self.origin, role)
        self._last_error, self._waits = None, doubling_waits(*self.retry_waits_s)
        return min(max(answer.lease_s / _RENEWALS_PER_LEASE, _MIN_RENEWAL_S), _MAX_RENEWAL_S)

    def on_failure(self, error: Exception) -> float:
        """Record a failed report: no answer, a refusal, or an error; returns the seconds until the next report."""
        self.lost, self.address = not isinstance(error, Unavailable), None
        expected = isinstance(error, KvferryError)
        trouble = str(error) if expected else repr(error)
        if trouble != self._last_error:
            logger.warning("not registered at %s: %s", self.origin, trouble, exc_info=None if expected else error)
        self._last_error = trouble
        return next(self._waits)


def _error_message(content: bytes) -> str:
    """The error in an answer that is not a success: the message in its error body if it has one."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])[:500]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


_Address = tuple[socket.AddressFamily, Any]
"""An address and its family, as the socket module has them."""


async def _look_up(peer: Origin) -> _Address:
    """A peer's address, within `_REQUEST_TIMEOUT_S`. Raises `ConfigError`."""
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            addresses = await asyncio.get_running_loop().getaddrinfo(peer.host, peer.port, type=socket.SOCK_DGRAM)
    except TimeoutError as error:
        raise _no_route(peer, f"its name could not be resolved within {_REQUEST_TIMEOUT_S:g} s") from error
    except (OSError, UnicodeError) as error:
        raise _no_route(peer, getattr(error, "strerror", None) or str(error)) from error
    family, _, _, _, address = addresses[0]
    return family, address


def _own_address(target: _Address, peer: Origin) -> str:
    """This machine's address as used to reach a peer. Sends nothing and does not wait. Raises `ConfigError`."""
    family, address = target
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise _no_route(peer, error.strerror or str(error)) from error


def _no_route(peer: Origin, reason: str) -> ConfigError:
    return ConfigError(f"no way to {peer}: {reason}; set --advertise-url")
