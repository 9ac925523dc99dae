"""Registration of an instance at a router: requests that are signed for the purpose `register` (`core.keys`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.core.peer_message import PeerMessage

REGISTER_PATH = "/kvferry/instances/register"

MAX_MESSAGE = 16 * 1024
"""Most bytes of a message on the wire."""

Role = Literal["prefill", "decode"]
State = Literal["up", "draining", "gone"]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class Announcement(PeerMessage, frozen=True, kw_only=True):
    """An instance's report of itself. `process` names its process; `engine_id` is empty if the engine has none;
    `bootstrap_port`: as in `--bootstrap-port`."""

    process: _Name
    url: Annotated[str, msgspec.Meta(max_length=2048, pattern=r"^[\x21-\x7e]+\Z")]
    role: Role
    state: State = "up"
    engine_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class Registered(PeerMessage, frozen=True, kw_only=True):
    """A router's answer. `lease_s`: how long the registration holds; `state`: what the router does with the
    instance."""

    lease_s: float
    state: Literal["serving", "draining", "drained", "gone"] = "serving"
