"""How two instances make sure of each other before anything else is said.

    dialling side ── Hello(purpose, nonce) ─────────► listener
                  ◄────────────── Challenge(nonce) ──
                  ── Proof(identity, code) ─────────►   the dialling side proves itself first: a stranger that
                  ◄───────── Welcome(identity, code) ── connects learns nothing about the listener

A code is HMAC-SHA256, keyed by the shared token, of the side's name and of all that was said before it, the
identity it comes with included; so neither side's code can be played back to it, nor an identity be swapped. From then
on each frame is sealed with a key of its direction, made in the same way: one that was changed on its way is noticed.
Where TLS is asked for it comes before all this, and a side that does not speak it as the other does is told so.
Both sides then compare layouts: each has both, so each raises `LayoutMismatch` naming the field where one's blocks
cannot be made of the other's.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
from contextlib import suppress

import msgspec

from kvferry.core.errors import AuthenticationFailed, KvferryError, PeerLost, ProtocolError
from kvferry.transport.connection import Connection
from kvferry.transport.tls import ChannelTls
from kvferry.transport.wire import (
    PROTOCOL_VERSION,
    AnyMessage,
    Challenge,
    Hello,
    Identity,
    Message,
    Proof,
    Refused,
    Welcome,
)

HANDSHAKE_S = 5.0
NONCE_BYTES = 32
_TLS_HANDSHAKE = 0x16
"""The first byte of TLS; of our own frames, a length that no greeting has."""
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"})
"""What OpenSSL calls an answer that is not TLS, in its several versions."""
_ALL_OR_NONE = "set tls_cert, tls_key and tls_ca in the kv_connector_extra_config of all instances, or of none"
_UNKNOWN_TOKEN = "the shared token differs; start both instances with the same KVFERRY_AUTH_TOKEN"


async def begin_tls(connection: Connection, tls: ChannelTls, where: str) -> None:
    """The dialling side's part before `greet`. Raises `AuthenticationFailed` or `ProtocolError` that names the listener
    at `where`, or `PeerLost`. A listener that refuses our certificate may say so only in `greet`."""
    try:
        await connection.encrypt(tls.client, server_side=False)
    except (AuthenticationFailed, ProtocolError) as error:
        if isinstance(error.__cause__, ssl.SSLError) and error.__cause__.reason in _NOT_TLS:
            raise ProtocolError(f"{where} does not speak TLS, and this instance is to: {_ALL_OR_NONE}") from error
        raise type(error)(f"{where}: {error}") from error


async def agree_on_tls(connection: Connection, tls: ChannelTls | None) -> None:
    """The listener's part before `answer`. Raises as `begin_tls`, the peer having been told."""
    first = await connection.first_byte()
    if first is None:
        raise PeerLost("the peer left without a word")
    if (first == _TLS_HANDSHAKE) == (tls is not None):
        if tls is not None:
            await connection.encrypt(tls.server, server_side=True)
        return
    connection.discard()
    speaks, wants = ("TLS", "none") if tls is None else ("no TLS", "it")
    with suppress(PeerLost):
        await connection.send(Refused("protocol", f"the listener wants {'no ' * (tls is None)}TLS: {_ALL_OR_NONE}"))
    raise ProtocolError(f"the peer speaks {speaks}, and this instance wants {wants}: {_ALL_OR_NONE}")


async def greet(connection: Connection, purpose: str, identity: Identity, token: str) -> None:
    """The dialling side's half. Afterwards `connection.peer` is set.

    Raises `AuthenticationFailed`, `LayoutMismatch`, `ProtocolError` or `PeerLost`.
    """
    hello = Hello(PROTOCOL_VERSION, purpose, secrets.token_bytes(NONCE_BYTES))
    await connection.send(hello)
    challenge = await _receive(connection, Challenge)
    _require_version(challenge.protocol)
    said: list[Message] = [hello, challenge, identity]
    await connection.send(Proof(identity, _code(token, "dialler", said)))
    welcome = await _receive(connection, Welcome)
    if not hmac.compare_digest(welcome.code, _code(token, "listener", [*said, welcome.identity])):
        raise AuthenticationFailed(f"the listener cannot prove who it is: {_UNKNOWN_TOKEN}")
    connection.trust(welcome.identity)
    said.append(welcome.identity)
    connection.seal_frames(_code(token, "dialler's frames", said), _code(token, "listener's frames", said))
    identity.layout.require_reconcilable(welcome.identity.layout)


async def answer(connection: Connection, purposes: frozenset[str], identity: Identity, token: str) -> str:
    """The listener's half; returns the purpose. Raises as `greet` does, the peer having been told."""
    try:
        hello = await connection.receive(Hello)
        purpose = _served_purpose(hello, purposes)
        challenge = Challenge(PROTOCOL_VERSION, secrets.token_bytes(NONCE_BYTES))
        await connection.send(challenge)
        proof = await connection.receive(Proof)
        said: list[Message] = [hello, challenge, proof.identity]
        if not hmac.compare_digest(proof.code, _code(token, "dialler", said)):
            raise AuthenticationFailed(f"the peer cannot prove who it is: {_UNKNOWN_TOKEN}")
    except (AuthenticationFailed, ProtocolError) as error:
        with suppress(PeerLost):
            await connection.send(Refused(_kind(error), str(error)))
        raise
    connection.trust(proof.identity)
    said.append(identity)
    await connection.send(Welcome(identity, _code(token, "listener", said)))
    connection.seal_frames(_code(token, "listener's frames", said), _code(token, "dialler's frames", said))
    identity.layout.require_reconcilable(proof.identity.layout)
    return purpose


def _code(token: str, side: str, said: list[Message]) -> bytes:
    digest = hashlib.sha256()
    for message in said:
        body = msgspec.msgpack.encode(message)
        digest.update(len(body).to_bytes(8, "big") + body)
    return hmac.digest(token.encode(), side.encode() + digest.digest(), "sha256")


async def _receive(connection: Connection, kind: type[AnyMessage]) -> AnyMessage:
    message: AnyMessage | Refused = await connection.receive(kind | Refused)
    if isinstance(message, Refused):
        raise (AuthenticationFailed if message.kind == "authentication" else ProtocolError)(message.reason)
    return message


def _served_purpose(hello: Hello, purposes: frozenset[str]) -> str:
    _require_version(hello.protocol)
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError("a nonce of the wrong length")
    if hello.purpose not in purposes:
        raise ProtocolError(f"no service {hello.purpose[:40]!r} here")
    return hello.purpose


def _require_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol {theirs}, this instance {PROTOCOL_VERSION}; run the same kvferry on both"
        )


def _kind(error: KvferryError) -> str:
    return "authentication" if isinstance(error, AuthenticationFailed) else "protocol"
