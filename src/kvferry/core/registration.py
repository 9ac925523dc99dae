"""How an instance registers at a router: a message that is sealed with a key derived from the shared token.

A message is valid for one router process (`router`, a name that the router draws at its start and sends to whoever uses
none or an older one), once (`number` grows with each), and not for longer than clocks may differ. A message that was
read on the wire is therefore useless, at another router and at the same one after a restart.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec

from kvferry.core.errors import AuthenticationFailed, LeaseEnded, ProtocolError

REGISTER_PATH = "/kvferry/instances/register"

LONGEST_MESSAGE = 16 * 1024
"""Most bytes of a message on the wire."""

SKEW_S = 60.0
"""How much the clocks of two machines may differ."""

_HINT = "start routers and instances with the same KVFERRY_AUTH_TOKEN"

Role = Literal["prefill", "decode"]
State = Literal["up", "draining", "gone"]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class Announcement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an instance says about itself. `process` names its process; `number`: nanoseconds since the epoch, and
    greater than in any earlier message; `engine_id` is empty if the engine has none; `bootstrap_port`: as in
    `--bootstrap-port`."""

    router: _Name
    process: _Name
    number: int
    url: Annotated[str, msgspec.Meta(max_length=2048, pattern=r"^[\x21-\x7e]+\Z")]
    role: Role
    state: State = "up"
    engine_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """A router's answer. `router`: its name, for the next message; `lease_s`: how long the registration holds; `state`:
    what the router does with the instance; `unknown_router`: the message named another router process, and has to be
    sent again with this name."""

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
    """A key derived from the shared token; empty without a token. Unlike `fleet_key`, it is never sent."""
    return hmac.digest(token.encode(), b"kvferry registrations", "sha256") if token else b""


def seal(key: bytes, announcement: Announcement) -> bytes:
    """The message on the wire."""
    content = msgspec.json.encode(announcement)
    return msgspec.json.encode(_Sealed(msgspec.Raw(content), _digest(key, content)))


def unseal(key: bytes, message: bytes, now: float) -> Announcement:
    """The announcement in a message that arrived at `now` (seconds since the epoch). Raises `AuthenticationFailed`,
    `ProtocolError` or `LeaseEnded`."""
    try:
        envelope = _ENVELOPES.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the registration cannot be read: {error}") from error
    content = bytes(envelope.announcement)
    if not key or not hmac.compare_digest(envelope.seal.encode(), _digest(key, content).encode()):
        raise AuthenticationFailed(f"the registration was not sealed by an instance of this fleet; {_HINT}")
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
