"""Authenticated requests from one kvferry process to another (`core.keys`)."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import AuthenticationFailed, ConfigError
from kvferry.core.keys import Purpose, Signer
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.proof import TokenProof
from kvferry.http.errors import AnswerTimeout, Unauthorized
from kvferry.http.headers import RawHeaders


def bearer(key: str) -> tuple[bytes, bytes]:
    """The header that presents a key. Raises `ConfigError` if no header can contain it; the message does not show the
    key."""
    try:
        value = key.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("a key is not UTF-8 text") from error
    if any(byte < 0x20 or byte == 0x7F for byte in value):
        raise ConfigError("a key contains a line break or another control character; remove it")
    return b"authorization", b"Bearer " + value


class SignedClient:
    """Requests to other kvferry servers, signed with keys derived from `secret`. A signed request is only sent to a
    server that has proved that it holds the same secret; to others, `key` is sent unchanged. Once a server has proved
    it, each connection of `client` to its address must prove it again. Owns the signers and the rejected servers."""

    rejected_s = 10.0
    """Seconds before a server that did not answer a challenge is challenged again."""

    def __init__(self, client: HttpClient, secret: str, key: str | None = None) -> None:
        self.client, self._secret = client, secret
        self._bearer: RawHeaders = [] if key is None else [bearer(key)]
        self._signers: dict[Origin, Signer] = {}
        self._rejected: dict[Origin, tuple[float, str]] = {}
        self._challenge_locks: dict[Origin, asyncio.Lock] = {}

    async def ask(
        self,
        origin: Origin,
        method: str,
        target: str,
        *,
        purpose: Purpose,
        timeout_s: float,
        headers: RawHeaders | None = None,
        body: bytes | None = None,
        max_bytes: int = 2**20,
        base_path: str = "",
    ) -> tuple[int, RawHeaders, bytes]:
        """Send a request as `HttpClient.ask`, signed for a purpose; `timeout_s` covers all of it. `base_path` precedes
        `target` on the way to the server, which does not see it. Raises `TransferError`."""
        settings: dict[str, Any] = {"timeout_s": timeout_s, "body": body, "max_bytes": max_bytes}
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(2):
                    signer = await self._signer(origin, base_path, timeout_s)
                    sent = [*(headers or []), *self._authorization(signer, method, target, purpose, body or b"")]
                    answer = await self.client.ask(origin, method, base_path + target, headers=sent, **settings)
                    if signer is None or answer[0] != Unauthorized.status:
                        break
                    self._signers.pop(origin, None)  # it was restarted, or the request was late
                return answer
        except TimeoutError as error:
            raise AnswerTimeout(f"{origin} did not answer {target} within {timeout_s:g} s", "next byte") from error

    async def authorization(
        self, origin: Origin, method: str, target: str, *, purpose: Purpose, timeout_s: float
    ) -> RawHeaders:
        """The headers of a request without a body that the caller sends itself. Raises `TransferError`."""
        signer = await self._signer(origin, "", timeout_s)
        return self._authorization(signer, method, target, purpose, b"")

    def _authorization(
        self, signer: Signer | None, method: str, target: str, purpose: Purpose, body: bytes
    ) -> RawHeaders:
        if signer is None:
            return self._bearer
        return [(b"authorization", signer.sign(purpose, method, target, body).encode())]

    async def rejection_reason(self, origin: Origin, timeout_s: float) -> str:
        """Reason why a server does not belong to the deployment; empty if it does. Raises `TransferError`."""
        signer = await self._signer(origin, "", timeout_s)
        return "" if signer is not None else self._rejected[origin][1]

    async def _signer(self, origin: Origin, base_path: str, timeout_s: float) -> Signer | None:
        """The signer for a server of the deployment. Of several concurrent callers, only the first challenges the
        server."""
        async with self._challenge_locks.setdefault(origin, asyncio.Lock()):
            rejected = self._rejected.get(origin)
            if origin in self._signers or (rejected is not None and rejected[0] > SYSTEM_CLOCK.monotonic()):
                return self._signers.get(origin)
            try:
                self._signers[origin] = await self._authenticate(origin, base_path, timeout_s)
            except AuthenticationFailed as error:
                self._rejected[origin] = SYSTEM_CLOCK.monotonic() + self.rejected_s, str(error)
            return self._signers.get(origin)

    async def _authenticate(self, origin: Origin, base_path: str, timeout_s: float) -> Signer:
        if not self._secret:
            raise AuthenticationFailed("this process has no token")
        return await self.client.authenticate(origin, TokenProof(self._secret, base_path), timeout_s)

    def forget(self, origin: Origin) -> None:
        """Forget a server that has left: a later one at its address need not prove anything."""
        self.client.forget_proof(origin)
        self._signers.pop(origin, None)
        self._rejected.pop(origin, None)
        self._challenge_locks.pop(origin, None)
