"""Access control: the keys that a server's paths require.

    open      /health, /version, …: everyone
    key       everything that uses or shows a model: an API key or an admin key, if any API key is set
    probe     GET /metrics, /kvferry/*: an admin key if one is set; otherwise an API key if one is set
    release   POST /kvferry/release: likewise
    page      GET /: the file of the page, which contains no data: everyone who reaches the listener of `probe`
    operate   paths that change something: likewise; a router changes its instances for operators only (`Caller`)
    register  instances that register themselves

A request that is signed for a purpose (`core.keys`) opens the paths of that name; an operator's also the paths of `key`
and `probe`. With an admin listener (`--admin-port`), `probe`, `release` and `operate` are served there only, and
the clients' listener answers them with 404. A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Keys are
compared by their SHA-256, all of them, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal

import msgspec

from kvferry.core.errors import AuthenticationFailed
from kvferry.core.keys import SCHEME, ReplayGuard, Verifier
from kvferry.core.messages.openai import UnknownRoute
from kvferry.http.errors import Unauthorized
from kvferry.http.headers import KEY_HEADERS
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.request import Caller, HttpRequest
from kvferry.http.server.response import Response

Access = Literal["open", "key", "page", "probe", "release", "operate", "register"]
"""The access that a route requires."""

ListenerKind = Literal["public", "admin", "all"]
"""The listener of a request: the clients', the admin's, or the only one."""

_API_KEY = KEY_HEADERS[1]
_ON_BOTH_LISTENERS = ("open", "register")
_OPERATOR_ACCESS = ("key", "probe", "operate")


class Guard:
    """Decides whether a request may be served."""

    max_nonce = 128

    def __init__(
        self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = (), verifier: Verifier | None = None
    ) -> None:
        self._api, self._admin = _digests(api_keys), _digests(admin_keys)
        self._verifier = verifier

    @classmethod
    def from_config(
        cls, config: HttpConfig, more_api_keys: Iterable[str] = (), used: ReplayGuard | None = None
    ) -> Guard:
        """The guard of one server, or of several at the same address that share the record of `used` signed requests.
        Raises `ConfigError`."""
        verifier = Verifier(config.secret, config.name, used=used) if config.secret else None
        return cls([*config.api_keys(), *more_api_keys], config.admin_keys(), verifier)

    def admit(self, access: Access, side: ListenerKind, request: HttpRequest) -> Caller:
        """Return the caller of a request that may be served. Raises `Unauthorized`, or `UnknownRoute` for a path of the
        other listener."""
        if access not in _ON_BOTH_LISTENERS and side == ("admin" if access == "key" else "public"):
            raise UnknownRoute(f"Invalid URL ({request.method} {request.path})")
        header = request.first.get(b"authorization", b"")
        if header.startswith(SCHEME.encode() + b" ") and self._verifier is not None:
            return self._signed(access, header.decode("latin-1"), request, self._verifier)
        if access != "register" and not (self._api or self._admin):
            return request.caller
        digest = self._presented(header, request.first.get(_API_KEY, b""))
        is_operator, is_client = _has(self._admin, digest), _has(self._api, digest)
        if access == "register":
            raise Unauthorized("A registration must be signed: give all processes the same KVFERRY_AUTH_TOKEN")
        if self._needs_key(access):
            if digest is None:
                raise Unauthorized(
                    "This server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
                )
            if not (is_operator or (is_client and (access == "key" or not self._admin))):
                raise Unauthorized("The key in the Authorization or x-api-key header is not valid")
        if digest is None or not (is_client or is_operator):
            return request.caller
        return Caller(digest, is_known=True, is_operator=is_operator)

    def _presented(self, authorization: bytes, api_key: bytes) -> bytes | None:
        """The digest of the client's key, the valid one of two; None if there is none."""
        scheme, _, token = authorization.partition(b" ")
        bearer = token if scheme.lower() == b"bearer" else b""
        digests = [hashlib.sha256(key.strip()).digest() for key in (bearer, api_key) if key.strip()]
        valid = [digest for digest in digests if _has(self._admin, digest) or _has(self._api, digest)]
        return next(iter([*valid, *digests]), None)

    def _needs_key(self, access: Access) -> bool:
        if access in ("open", "page", "key"):
            return access == "key" and bool(self._api)
        return bool(self._admin or self._api)

    def _signed(self, access: Access, header: str, request: HttpRequest, verifier: Verifier) -> Caller:
        """The caller of a signed request. An invalid signature is refused even if none is needed."""
        try:
            purpose, body_sha256 = verifier.check(header, request.method, request.target)
        except AuthenticationFailed as error:
            raise Unauthorized(str(error)) from error
        is_operator = purpose == "operate"
        opens = purpose == access or (is_operator and access in _OPERATOR_ACCESS)
        if not opens and (access == "register" or self._needs_key(access)):
            raise Unauthorized(f"The request is signed for another purpose ({purpose})")
        request.body.require(body_sha256)
        return Caller(request.client.encode(), is_known=True, is_signed=True, is_operator=is_operator)

    async def challenge(self, request: HttpRequest, response: Response) -> None:
        """Serve GET /kvferry/challenge?nonce=…, which proves that this server holds the deployment's secret."""
        nonce = request.parameter("nonce")
        if self._verifier is None or not 0 < len(nonce) <= self.max_nonce:
            raise UnknownRoute(f"Invalid URL ({request.method} {request.path})")
        response.send_json(msgspec.json.encode(self._verifier.answer(nonce)))


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _has(digests: list[bytes], digest: bytes | None) -> bool:
    return digest is not None and bool(sum(hmac.compare_digest(digest, known_digest) for known_digest in digests))
