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
from kvferry.http.relay import StreamForwarder
from kvferry.http.server.config import HttpConfig
from kvferry.router.headers import JSON
from kvferry.router.instances.instance import Instance

_PUBLIC_PATHS = frozenset({"/health", "/version", "/query"})
"""Paths that every engine serves without a key, so that the router sends none."""

_NO_ACCESS, _DEFAULT_HTTP = InstanceAccess(), HttpConfig()


class Connections:
    """The connections, as an asynchronous context manager. Errors are `TransferError`s that name the instance, not its
    address."""

    max_own_answer = 2**20
    """Maximum number of bytes of an answer to the router's own request."""
    idle_connection_s = 1.0
    """Far less than the 5 s after which uvicorn, and so vLLM, closes an idle connection: on a busy machine the two ends
    disagree by seconds about when it became idle."""

    def __init__(
        self, access: InstanceAccess = _NO_ACCESS, http: HttpConfig = _DEFAULT_HTTP, *, fast_path: bool = True
    ) -> None:
        """`fast_path`: streamed answers are relayed in compiled code."""
        key = access.api_key()
        self.authorization: RawHeaders = [] if key is None else [bearer(key)]
        """The header that replaces the client's own `Authorization` in requests of clients; empty: the client's own
        header is forwarded."""
        self._relays = StreamForwarder() if fast_path else None
        self.http = HttpClient(
            access.tls_context(http.tls_ca),
            idle_s=self.idle_connection_s,
            relays=self._relays,
            client_name="the router",
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
        """Send the router's own request; return status and body. `headers`: a client's authorization, used if the
        router has none for the instances. With a `purpose` it is signed, if the instance belongs to this deployment.
        Raises `TransferError`, also `TransferTimeout`."""
        sent: RawHeaders = [] if body is None else [JSON]
        origin, path = instance.address.origin, instance.address.base_path
        limits: dict[str, Any] = {"timeout_s": timeout_s, "body": body, "max_bytes": self.max_own_answer}
        try:
            if purpose is not None:
                reply = self._signed.ask(
                    origin, method, target, purpose=purpose, headers=sent, base_path=path, **limits
                )
            else:
                sent += [] if target in _PUBLIC_PATHS else self.authorization or headers or []
                reply = self.http.ask(origin, method, path + target, headers=sent, **limits)
            status, _, answer = await reply
        except AnswerTimeout as error:
            raise TransferTimeout(f"{instance} did not answer {target} within {timeout_s:g} s") from error
        return status, answer

    async def metrics(self, instance: Instance, timeout_s: float) -> tuple[int, bytes]:
        """Send GET /metrics to an instance; return status and body."""
        return await self.ask(instance, "GET", "/metrics", timeout_s, purpose="probe")

    def close(self, instance: Instance) -> None:
        """Close the connections to an instance that is gone for good."""
        self.http.forget(instance.address.origin)
        self._signed.forget(instance.address.origin)
