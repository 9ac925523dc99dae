"""The router's connections to its instances, and its own requests to them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from kvferry.core.errors import TransferTimeout
from kvferry.core.keys import Purpose
from kvferry.http.client.access import InstanceAccess
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.signed_client import SignedClient, bearer
from kvferry.http.errors import AnswerTimeout
from kvferry.http.headers import RawHeaders
from kvferry.http.relay import Relays
from kvferry.http.server.config import HttpConfig
from kvferry.router.headers import JSON
from kvferry.router.instances.instance import Instance

_IDLE_CONNECTION_S = 1.0
"""Far less than the 5 s after which uvicorn, and so vLLM, closes an idle connection: on a busy machine the two ends
disagree by seconds about when it became idle."""

_MAX_OWN_ANSWER = 2**20
"""Bytes of an answer to a request of the router's own."""

_KEYLESS = frozenset({"/health", "/version", "/query"})
"""Open to all at every engine, and so asked without any key."""

_OPEN, _ALONE = InstanceAccess(), HttpConfig()


class Connections:
    """An asynchronous context manager. Its errors are `TransferError`s that name the instance, not its address."""

    def __init__(self, access: InstanceAccess = _OPEN, http: HttpConfig = _ALONE, *, fast_path: bool = True) -> None:
        """`fast_path`: whether streamed answers are relayed in compiled code."""
        key = access.api_key()
        self.authorization: RawHeaders = [] if key is None else [bearer(key)]
        """The header for requests of clients, in place of the client's own; empty: the client's own goes on."""
        self._relays = Relays() if fast_path else None
        self.http = HttpClient(
            access.tls_context(http.tls_ca), idle_s=_IDLE_CONNECTION_S, relays=self._relays, who="the router"
        )
        """The client for the legs of clients' requests."""
        self._signed = SignedClient(self.http, http.secret, key)

    async def __aenter__(self) -> Self:
        if self._relays is not None:
            await self._relays.__aenter__()
        await self.http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.__aexit__(kind, error, trace)
        if self._relays is not None:
            await self._relays.__aexit__()

    async def ask(
        self,
        instance: Instance,
        method: str,
        target: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: RawHeaders | None = None,
        purpose: Purpose | None = None,
    ) -> tuple[int, bytes]:
        """A request of the router's own: status and body. `headers`: a client's authorization, for where the router was
        given none for the instances. With a `purpose` it is signed, if the instance is of this deployment. Raises
        `TransferError`, of which `TransferTimeout` is one."""
        sent: RawHeaders = [] if body is None else [JSON]
        origin, path = instance.address.origin, instance.address.base_path
        limits: dict[str, Any] = {"timeout_s": timeout_s, "body": body, "max_bytes": _MAX_OWN_ANSWER}
        try:
            if purpose is not None:
                asked = self._signed.ask(
                    origin, method, target, purpose=purpose, headers=sent, base_path=path, **limits
                )
            else:
                sent += [] if target in _KEYLESS else self.authorization or headers or []
                asked = self.http.ask(origin, method, path + target, headers=sent, **limits)
            status, _, answer = await asked
        except AnswerTimeout as error:
            raise TransferTimeout(f"{instance} did not answer {target} within {timeout_s:g} s") from error
        return status, answer

    async def metrics(self, instance: Instance, timeout_s: float) -> tuple[int, bytes]:
        """Ask for an instance's GET /metrics."""
        return await self.ask(instance, "GET", "/metrics", timeout_s, purpose="probe")

    def close(self, instance: Instance) -> None:
        """Close the connections to an instance that is gone for good."""
        self.http.forget(instance.address.origin)
        self._signed.forget(instance.address.origin)
