"""Who may use which path: API keys for clients, admin keys for operators and for the fleet's own processes.

    open    /health, /version, …: everyone
    key     everything that uses or shows a model: an API key or an admin key, if any API key is set
    admin   /metrics, /kvferry/*: an admin key if one is set; otherwise an API key if one is set

With an admin listener (`--admin-port`), the admin paths are served there only, and the clients' listener answers them
with 404. Keys are compared by their SHA-256, all of them, in constant time.

Processes of one fleet authenticate each other with `fleet_key`, which is derived from the token that authenticates
their KV connections. The token itself is never sent, so that nobody who reads an HTTP request can fetch KV.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum
from typing import Literal

from kvferry.core.errors import ConfigError
from kvferry.core.openai import UnknownRoute
from kvferry.http.errors import Unauthorized

_PURPOSE = b"kvferry admin over HTTP"


class Access(Enum):
    """Which key a route requires."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


Side = Literal["public", "admin", "all"]
"""Which listener a request came in by: the clients', the admin's, or the only one there is."""


def fleet_key(auth_token: str) -> str:
    """The admin key that all processes with the same `auth_token` share."""
    return hmac.new(auth_token.encode(), _PURPOSE, hashlib.sha256).hexdigest()


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


class Guard:
    """Decides whether a request may be served. `fleet_keys` are accepted on admin paths, but do not make keys
    mandatory."""

    def __init__(
        self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = (), fleet_keys: Iterable[str] = ()
    ) -> None:
        api, admin, fleet = _digests(api_keys), _digests(admin_keys), _digests(fleet_keys)
        self._accepted: dict[Access, list[bytes] | None] = {
            Access.OPEN: None,
            Access.KEY: [*api, *admin, *fleet] if api else None,
            Access.ADMIN: [*(admin or api), *fleet] if admin or api else None,
        }

    def check(self, access: Access, side: Side, authorization: bytes | None, where: str) -> None:
        """Raise `Unauthorized`, or `UnknownRoute` for a path of the other listener."""
        if access is not Access.OPEN and side == ("public" if access is Access.ADMIN else "admin"):
            raise UnknownRoute(f"Invalid URL ({where})")
        accepted = self._accepted[access]
        if accepted is None:
            return
        digest = _presented(authorization)
        if digest is None:
            raise Unauthorized("This server needs a key: send the header Authorization: Bearer KEY")
        if not sum(hmac.compare_digest(digest, one) for one in accepted):
            raise Unauthorized("The key in the Authorization header is not valid")

    def caller(self, authorization: bytes | None, address: str) -> bytes:
        """Identifies the caller of a path with `Access.KEY` after `check`: by the digest of its key, however the header
        was written; by the client's address if no keys are required."""
        digest = _presented(authorization)
        is_known = digest is not None and any(digest == one for one in self._accepted[Access.KEY] or ())
        return digest if is_known and digest is not None else address.encode()


def _presented(authorization: bytes | None) -> bytes | None:
    """The digest of the key in a header, None when there is none."""
    scheme, _, key = (authorization or b"").partition(b" ")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" and key.strip() else None


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]
