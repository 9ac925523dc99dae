"""How two instances authenticate each other on a new connection.

    dialling side ── Hello(purpose, nonce) ─────────► listener
                  ◄──────────────── Hello("", nonce) ──
                  ── Proof(identity, code) ─────────►   the dialling side proves itself first, so that a stranger
                  ◄────────── Proof(identity, code) ──  learns nothing about the listener

A code is an HMAC-SHA256 with a key derived from the shared token (`core.keys`), over the side's name, all messages so
far and the identity that it comes with. So neither side's code can be replayed to it, and no identity can be exchanged.
From then on each frame is sealed with a key for its direction, derived in the same way. Both sides then compare
layouts, and each raises `LayoutMismatch` with the field if blocks cannot be converted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from contextlib import suppress
from typing import TypeVar

import msgspec

from kvferry.core import entropy
from kvferry.core.errors import AuthenticationFailed, PeerLost, ProtocolError
from kvferry.core.keys import derive
from kvferry.core.messages.wire import Message
from kvferry.transport.connection import PROTOCOL_VERSION, Connection, Identity

NONCE_BYTES = 32
_UNKNOWN_TOKEN = "the shared token differs; start both instances with the same KVFERRY_AUTH_TOKEN"


class Hello(Message, frozen=True):
    """The first message of either side. `purpose`: the service that the dialling side asks for."""

    protocol: int
    purpose: str
    nonce: bytes


class Proof(Message, frozen=True):
    """Proves that this side knows the token. `code` covers all messages so far, and `identity`."""

    identity: Identity
    code: bytes


class Refused(Message, frozen=True):
    """The listener ends the connection. `kind`: "authentication" or "protocol"."""

    kind: str
    reason: str


Greeting = TypeVar("Greeting", Hello, Proof)


async def greet(connection: Connection, purpose: str, identity: Identity, token: str) -> None:
    """The dialling side's half of the handshake. Afterwards `connection.peer` is set.

    Raises `AuthenticationFailed`, `LayoutMismatch`, `ProtocolError` or `PeerLost`.
    """
    hello = Hello(PROTOCOL_VERSION, purpose, entropy.token_bytes(NONCE_BYTES))
    await connection.send(hello)
    answered = await _receive(connection, Hello)
    _require_version(answered)
    transcript: list[Message] = [hello, answered, identity]
    await connection.send(Proof(identity, _code(token, "dialler", transcript)))
    proof = await _receive(connection, Proof)
    transcript.append(proof.identity)
    if not hmac.compare_digest(proof.code, _code(token, "listener", transcript)):
        raise AuthenticationFailed(f"the listener cannot authenticate itself: {_UNKNOWN_TOKEN}")
    connection.trust(
        proof.identity, _code(token, "dialler's frames", transcript), _code(token, "listener's frames", transcript)
    )
    identity.layout.require_reconcilable(proof.identity.layout)


async def answer(connection: Connection, purposes: Collection[str], identity: Identity, token: str) -> str:
    """The listener's half of the handshake; returns the purpose. Raises as `greet`; a peer that is refused gets a
    `Refused`."""
    try:
        hello: Hello = await connection.receive(Hello)
        _require_version(hello)
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("a nonce of the wrong length")
        if hello.purpose not in purposes:
            raise ProtocolError(f"no service {hello.purpose[:40]!r} here")
        ours = Hello(PROTOCOL_VERSION, "", entropy.token_bytes(NONCE_BYTES))
        await connection.send(ours)
        proof: Proof = await connection.receive(Proof)
        transcript: list[Message] = [hello, ours, proof.identity]
        if not hmac.compare_digest(proof.code, _code(token, "dialler", transcript)):
            raise AuthenticationFailed(f"the peer cannot authenticate itself: {_UNKNOWN_TOKEN}")
    except (AuthenticationFailed, ProtocolError) as error:
        kind = "authentication" if isinstance(error, AuthenticationFailed) else "protocol"
        with suppress(PeerLost):
            await connection.send(Refused(kind, str(error)))
        raise
    transcript.append(identity)
    await connection.send(Proof(identity, _code(token, "listener", transcript)))
    connection.trust(
        proof.identity, _code(token, "listener's frames", transcript), _code(token, "dialler's frames", transcript)
    )
    identity.layout.require_reconcilable(proof.identity.layout)
    return hello.purpose


def _code(token: str, side: str, transcript: list[Message]) -> bytes:
    digest = hashlib.sha256()
    for message in transcript:
        body = msgspec.msgpack.encode(message)
        digest.update(len(body).to_bytes(8, "big") + body)
    return hmac.digest(derive(token, "kv"), side.encode() + digest.digest(), "sha256")


async def _receive(connection: Connection, kind: type[Greeting]) -> Greeting:
    message: Greeting | Refused = await connection.receive(kind | Refused)
    if isinstance(message, Refused):
        raise (AuthenticationFailed if message.kind == "authentication" else ProtocolError)(message.reason)
    return message


def _require_version(theirs: Hello) -> None:
    number = theirs.protocol
    if number != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol {number}, this instance {PROTOCOL_VERSION}; run the same kvferry on both"
        )
