"""How an instance tells a router that it is there: a message, sealed with a key that is derived from the fleet's token.

A message holds for one router process (`router`, a name that the router draws at its start and tells whoever brings
none or an older one), once (`number` grows with each), and not for longer than clocks may differ. So one that somebody
has read on the wire is of no use to him, neither at another router nor at the same one after a restart.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import AuthenticationFailed, LeaseEnded, ProtocolError

REGISTER_PATH = "/kvferry/instances/register"

LONGEST_MESSAGE = 16 * 1024
"""Bytes of a message, as it travels."""

SKEW_S = 60.0
"""How much the clocks of two machines may differ."""

_HINT = "start routers and instances with the same KVFERRY_AUTH_TOKEN"

Role = Literal["prefill", "decode"]
State = Literal["up", "draining", "gone"]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class Announcement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an instance says of itself. `process` names the process; `number`: nanoseconds since the epoch, and more
    than in any message before; `engine_id` empty: the engine has none; `bootstrap_port`: as in `--bootstrap-port`."""

    router: _Name
    process: _Name
    number: int
    url: Annotated[str, msgspec.Meta(max_length=2048, pattern=r"^[\x21-\x7e]+\Z")]
    role: Role
    state: State = "up"
    engine_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """A router's answer. `router`: its name, for the next message; `lease_s`: for how long it keeps the instance
    without hearing of it; `state`: what it does with it; `unknown_router`: the message was for another one, and has to
    be sent again with this name."""

    router: str
    lease_s: float
    state: Literal["serving", "draining", "drained", "gone"] = "serving"
    unknown_router: bool = False


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    announcement: msgspec.Raw
    seal: str


_ENVELOPES = msgspec.json.Decoder(_Sealed)
_ANNOUNCEMENTS = msgspec.json.Decoder(Announcement)


def registration_key(token: str) -> bytes:
    """From the fleet's token; empty without one. Unlike `fleet_key` it never travels."""
    return hmac.digest(token.encode(), b"kvferry registrations", "sha256") if token else b""


def seal(key: bytes, announcement: Announcement) -> bytes:
    """The message, for the wire."""
    content = msgspec.json.encode(announcement)
    return msgspec.json.encode(_Sealed(msgspec.Raw(content), _digest(key, content)))


def unseal(key: bytes, message: bytes, now: float) -> Announcement:
    """What is in a message that came at `now`, in seconds since the epoch. Raises `AuthenticationFailed`,
    `ProtocolError` and `LeaseEnded`."""
    try:
        envelope = _ENVELOPES.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the registration cannot be read: {error}") from error
    content = bytes(envelope.announcement)
    if not key or not hmac.compare_digest(envelope.seal.encode(), _digest(key, content).encode()):
        raise AuthenticationFailed(f"the registration is of no instance of this fleet; {_HINT}")
    try:
        announcement = _ANNOUNCEMENTS.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the registration cannot be read: {error}") from error
    if abs(announcement.number / 1e9 - now) > SKEW_S:
        raise LeaseEnded(
            f"the registration was made {now - announcement.number / 1e9:.0f} s ago by this router's clock, and holds"
            f" for {SKEW_S:.0f} s; if it is new, set the clocks of both machines"
        )
    return announcement


def _digest(key: bytes, content: bytes) -> str:
    return hmac.new(key, b"registration\0" + content, hashlib.sha256).hexdigest()
