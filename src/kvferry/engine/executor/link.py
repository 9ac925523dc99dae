"""Connections between rank 0 and ranks that it did not start, which may be on other machines.

    rank ── RankHello(versions, name, nonce) ──► rank 0
         ◄────────────── EngineHello(nonce) ──
         ── RankProof(code) ───────────────────►   the rank proves itself first, so that strangers get nothing
         ◄────────────── EngineProof(code) ──

A code is an HMAC with a key that is derived from the deployment's secret for this purpose, over the side's name and
both hellos. From then on each frame is sealed with a key for its direction, and is not encrypted.
"""

from __future__ import annotations

import hmac
import os
import platform
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch

from kvferry import __version__
from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, PeerLost, ProtocolError, RankLost
from kvferry.core.keys import derive
from kvferry.core.messages import wire
from kvferry.core.messages.wire import Pipe
from kvferry.core.runtime.threads import Thread
from kvferry.core.settings.addresses import parse_address
from kvferry.core.settings.environment import AUTH_TOKEN
from kvferry.engine.executor.messages import engine_end, rank_end

HANDSHAKE_S = 10.0
"""Max seconds of a handshake."""
_HANDSHAKE_BYTES = 4096
_NAME_CHARACTERS = 100
_RETRY_S = 0.5
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 20_000}
"""A machine that is lost without closing its connections is detected after 20 seconds."""
_VERSIONS = f"kvferry {__version__}, torch {torch.__version__}"


class RankHello(wire.Message, frozen=True):
    """The rank's first message. `versions`: the packages whose version must be the same on all ranks; `name`: for
    logs."""

    versions: str
    name: str
    nonce: bytes


class EngineHello(wire.Message, frozen=True):
    """Rank 0's first message."""

    nonce: bytes


class RankProof(wire.Message, frozen=True):
    """Proves that the rank holds the secret."""

    code: bytes


class EngineProof(wire.Message, frozen=True):
    """Proves that rank 0 holds the secret."""

    code: bytes


class RankRefused(wire.Message, frozen=True):
    """Rank 0 ends the connection."""

    reason: str


@dataclass(frozen=True)
class Link:
    """A connection to one other rank, or to rank 0. `name`: the other process, for logs. `address`: this side's, at
    which the other ranks reach this process."""

    pipe: Pipe
    name: str
    address: str


class RankListener:
    """Accepts the connections of the other ranks. Owns the listening socket, until `close`."""

    accept_s = 0.1
    handshake_s = HANDSHAKE_S
    max_handshakes = 16
    """Max number of concurrent handshakes; further connections are closed."""

    def __init__(self, address: str, token: str) -> None:
        """Listen at `address`, `HOST:PORT`. Raises `ConfigError` if that is impossible."""
        if not token:
            raise ConfigError(f"--ranks-at needs {AUTH_TOKEN}, the same for all ranks: openssl rand -hex 32")
        self.address, self._token = address, token
        host, port = parse_address(address, "--ranks-at")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--ranks-at {address}: cannot listen there: {error}") from error
        self._socket.settimeout(self.accept_s)
        self._joined: SimpleQueue[Link] = SimpleQueue()  # bounded by the greetings
        self._handshakes = threading.BoundedSemaphore(self.max_handshakes)
        self._last_refusal = ""
        self._is_closed = False

    def wait_for_ranks(self, num_ranks: int, timeout_s: float, on_progress: Callable[[int], None]) -> list[Link]:
        """Wait for `num_ranks` ranks; `on_progress` gets the number that have joined. Raises `RankLost` after
        `timeout_s`."""
        links: list[Link] = []
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        try:
            on_progress(0)
            while len(links) < num_ranks:
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise RankLost(self._missing(len(links), num_ranks, timeout_s))
                self._accept()
                with suppress(Empty):
                    while len(links) < num_ranks:
                        links.append(self._joined.get_nowait())
                        on_progress(len(links))
        except BaseException:
            for link in links:
                link.pipe.close()
            raise
        return links

    def close(self) -> None:
        """Stop listening. Connections of surplus ranks are closed."""
        self._is_closed = True
        self._socket.close()
        self._drop()

    def _drop(self) -> None:
        with suppress(Empty):
            while True:
                self._joined.get_nowait().pipe.close()

    def _missing(self, num_joined: int, expected: int, timeout_s: float) -> str:
        reason = f" (the last one that connected was refused: {self._last_refusal})" if self._last_refusal else ""
        return (
            f"{num_joined} of {expected} other ranks came to {self.address} within {timeout_s:g} s{reason}; start each"
            f" with `kvferry rank {self.address}`"
        )

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._socket.accept()
        except TimeoutError:
            return
        except OSError as error:  # no descriptors are left, or the client disconnected
            self._last_refusal = str(error)
            threading.Event().wait(self.accept_s)
            return
        if not self._handshakes.acquire(blocking=False):
            connection.close()
            return
        Thread(self._handshake, connection, host, name="kvferry-rank-greeting").start()

    def _handshake(self, connection: socket.socket, host: str) -> None:
        try:
            self._joined.put(_with_deadline(connection, self.handshake_s, self._answer_rank, host))
            if self._is_closed:
                self._drop()
        except (KvferryError, OSError) as error:
            self._last_refusal = f"{host}: {error}"
        finally:
            self._handshakes.release()

    def _answer_rank(self, connection: socket.socket, host: str) -> Link:
        pipe = Pipe(os.dup(connection.fileno()), RankHello | RankProof, limit=_HANDSHAKE_BYTES, send_s=self.handshake_s)
        try:
            hello, answer = _expect(pipe, RankHello), EngineHello(entropy.token_bytes(32))
            if hello.versions != _VERSIONS:
                raise ProtocolError(f"it runs {hello.versions[:_NAME_CHARACTERS]}, and rank 0 {_VERSIONS}")
            pipe.send(answer)
            proof = _expect(pipe, RankProof)
            if not hmac.compare_digest(proof.code, _code(self._token, "rank", hello, answer)):
                raise AuthenticationFailed(f"it does not hold the same {AUTH_TOKEN}")
            pipe.send(EngineProof(_code(self._token, "rank 0", hello, answer)))
        except (AuthenticationFailed, ProtocolError) as error:
            with suppress(PeerLost):
                pipe.send(RankRefused(str(error)))
            raise
        finally:
            pipe.close()
        keys = _code(self._token, "rank 0's frames", hello, answer), _code(self._token, "rank's frames", hello, answer)
        name = "".join(character for character in hello.name[:_NAME_CHARACTERS] if character.isprintable())
        address = str(connection.getsockname()[0])
        return Link(engine_end(connection.detach(), keys), f"{name} on {host}", address)


def join(address: str, token: str, timeout_s: float) -> Link:
    """Connect to rank 0, which may not have begun to listen yet. Raises `ConfigError` if it refuses this rank or is not
    rank 0, and `RankLost` if it cannot be reached within this time."""
    host, port = parse_address(address, "the address of rank 0")
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
            return _with_deadline(connection, HANDSHAKE_S, _greet_rank0, address, token)
        except (AuthenticationFailed, ProtocolError) as error:
            raise ConfigError(f"rank 0 at {address}: {error}") from error
        except (PeerLost, OSError, UnicodeError) as error:
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise RankLost(f"rank 0 is not at {address}, for {timeout_s:g} s: {error}") from error
        threading.Event().wait(_RETRY_S)


def _greet_rank0(connection: socket.socket, address: str, token: str) -> Link:
    kinds = EngineHello | EngineProof | RankRefused
    pipe = Pipe(os.dup(connection.fileno()), kinds, limit=_HANDSHAKE_BYTES, send_s=HANDSHAKE_S)
    try:
        hello = RankHello(_VERSIONS, f"process {os.getpid()} of {platform.node()}", entropy.token_bytes(32))
        pipe.send(hello)
        hello_of_rank0 = _expect(pipe, EngineHello)
        pipe.send(RankProof(_code(token, "rank", hello, hello_of_rank0)))
        proof = _expect(pipe, EngineProof)
    finally:
        pipe.close()
    if not hmac.compare_digest(proof.code, _code(token, "rank 0", hello, hello_of_rank0)):
        raise AuthenticationFailed(f"it does not hold the same {AUTH_TOKEN}")
    keys = _code(token, "rank's frames", hello, hello_of_rank0), _code(token, "rank 0's frames", hello, hello_of_rank0)
    own_address = str(connection.getsockname()[0])
    return Link(rank_end(connection.detach(), keys), f"rank 0 at {address}", own_address)


def _with_deadline(
    connection: socket.socket, timeout_s: float, handshake: Callable[..., Link], *arguments: str
) -> Link:
    """Run `handshake`, and close the connection if that fails or takes longer than `timeout_s`."""
    duplicate = connection.dup()
    timer = threading.Timer(timeout_s, _shut_down, (duplicate,))
    timer.daemon = True
    try:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        timer.start()
        return handshake(connection, *arguments)
    finally:
        timer.cancel()
        for handle in (duplicate, connection):  # does nothing if it was detached
            handle.close()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it has just been closed
        connection.shutdown(socket.SHUT_RDWR)


def _expect(pipe: Pipe, kind: Any) -> Any:
    message = pipe.receive()
    if isinstance(message, RankRefused):
        raise AuthenticationFailed(f"it refuses this rank: {message.reason}")
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} came where {kind.__name__} was expected")
    return message


def _code(token: str, side: str, hello: RankHello, answer: EngineHello) -> bytes:
    claims = msgspec.msgpack.encode([side, hello, answer])
    return hmac.digest(derive(token, "ranks"), claims, "sha256")
