"""The listener of an instance for other instances, and its connections to them.

One TCP port serves every purpose ("lookup", "read", …), so that only one has to be opened in a firewall. On a
connection, TLS comes first, if it is configured, and then the handshake (`transport.connection`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from kvferry.core.errors import ConfigError, KvferryError, PeerLost
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.connection import Connection, Identity, client_handshake, limited_to, server_handshake

if TYPE_CHECKING:
    from kvferry.transport.tls import ChannelTls

logger = logging.getLogger(__name__)

Handler = Callable[[Connection], Awaitable[None]]
"""Serves one authenticated connection until it ends; raises `KvferryError` to end it."""

HANDSHAKE_S = 5.0
MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_PER_ADDRESS = 128, 64
"""Connections before their handshake, in all and from one address; counted separately, so that unauthenticated clients
do not exclude peers. All instances of one machine, or behind one translated address, may dial at once."""
BACKLOG = 128
TLS_HANDSHAKE = 0x16
"""The first byte of TLS. As the first byte of a frame it would mean a length that no greeting has."""


class Listener:
    """A bound port, and this instance's identity for others. Register handlers with `handle`, then run `serve` on the
    instance's `TransferLoop`."""

    max_connections = 1024
    """Connections of peers that have passed the handshake."""

    def __init__(
        self,
        identity: Identity,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        handshake_s: float = HANDSHAKE_S,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        max_unauthenticated_per_address: int = MAX_UNAUTHENTICATED_PER_ADDRESS,
        advertised_host: str = "",
        advertised_port: int = 0,
        tls: ChannelTls | None = None,
    ) -> None:
        """Bind. Raises `ConfigError` if that fails, or if without a token other machines could reach the port.

        `advertised_host` and `advertised_port`: the address for peers, if it differs from the bound one (address
        translation). `max_unauthenticated`: connections in their handshake. With `tls`, connections without TLS are
        refused.
        """
        self.identity, self.tls, self._token, self.handshake_s = identity, tls, token, handshake_s
        self._max_unauthenticated = max_unauthenticated
        self._max_unauthenticated_per_address = max_unauthenticated_per_address
        self._handlers: dict[str, Handler] = {}
        self._num_open = 0
        self._unauthenticated: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._socket = _bind(host, port, allow_remote=bool(token))
        self.port: int = advertised_port or self._socket.getsockname()[1]
        self.host = advertised_host or _reachable_host(host, self._socket)
        """The address for peers: as advertised, else the bound address, or for a wildcard this machine's own."""

    def handle(self, purpose: str, handler: Handler) -> None:
        """Register the handler of connections for `purpose`."""
        assert purpose not in self._handlers, f"{purpose} is served already"
        self._handlers[purpose] = handler

    async def dial(self, host: str, port: int, purpose: str, deadline: float) -> Connection:
        """`dial` as this instance."""
        return await dial(host, port, purpose, self.identity, self._token, deadline, self.tls)

    async def serve(self) -> None:
        """Accept and serve until cancelled; then close every connection."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    sock, address = await _accept(loop, self._socket)
                    host, port = address[:2]
                    if self._is_full(host):
                        self._counts["refused_connections"] += 1
                        sock.close()
                        continue
                    self._num_open += 1
                    self._unauthenticated[host] += 1
                    group.create_task(self._serve_connection(sock, host, port))
        finally:
            self.close()

    def _is_full(self, host: str) -> bool:
        """True if another connection from this address must be refused."""
        num_unauthenticated = self._unauthenticated.total()
        return (
            self._num_open - num_unauthenticated >= self.max_connections
            or num_unauthenticated >= self._max_unauthenticated
            or self._unauthenticated[host] >= self._max_unauthenticated_per_address
        )

    async def _serve_connection(self, sock: socket.socket, host: str, port: int) -> None:
        peer_address = f"{host}:{port}"
        try:
            with ExitStack() as unauthenticated:
                unauthenticated.callback(self._on_authenticated, host)
                async with Connection(sock) as connection:
                    purpose = await self._admit(connection)
                    unauthenticated.close()
                    await self._handlers[purpose](connection)
        except PeerLost:
            pass  # the usual end of a connection
        except KvferryError as error:
            self._counts[f"rejected_{type(error).__name__}"] += 1
            logger.warning("a connection from %s was ended: %s", peer_address, error)
        except Exception:  # the edge between one peer and the instance: other connections continue
            self._counts["failed_connections"] += 1
            logger.exception("a connection from %s was ended by an internal error", peer_address)
        finally:
            self._num_open -= 1

    def _on_authenticated(self, host: str) -> None:
        self._unauthenticated -= Counter((host,))  # this keeps positive counts only

    async def _admit(self, connection: Connection) -> str:
        deadline = asyncio.get_running_loop().time() + self.handshake_s
        async with limited_to(deadline, "handshake"):
            if (first_byte := await connection.peek_byte()) is None:
                raise PeerLost("the peer disconnected without sending anything")
            if self.tls is not None or first_byte == TLS_HANDSHAKE:
                from kvferry.transport.tls import accept_tls  # only if one of the two uses TLS

                await accept_tls(connection, self.tls, uses_tls=first_byte == TLS_HANDSHAKE)
            return await server_handshake(connection, self._handlers, self.identity, self._token)

    def statistics(self) -> dict[str, float]:
        """Number of open connections, and counters of refused connections and of connections that an error ended."""
        return {
            "open_connections": float(self._num_open),
            **{name: float(n) for name, n in self._counts.items()},
        }

    def close(self) -> None:
        """Close the port; also of a listener that never served."""
        self._socket.close()


async def dial(
    host: str, port: int, purpose: str, identity: Identity, token: str, deadline: float, tls: ChannelTls | None = None
) -> Connection:
    """Connect and authenticate before `deadline` (s, monotonic), under TLS if `tls` is given. The caller owns the
    connection. Raises `PeerLost` if the listener is unreachable, `TransferTimeout`, or as `client_handshake`."""
    connection = Connection(await _connect(host, port, deadline))
    try:
        async with limited_to(deadline, f"handshake with {host}:{port}"):
            if tls is not None:
                await tls.begin(connection, f"{host}:{port}")
            await client_handshake(connection, purpose, identity, token)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _connect(host: str, port: int, deadline: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    async with limited_to(deadline, f"connecting to {host}:{port}"):
        try:
            candidates = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = candidates[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
        except (OSError, OverflowError, ValueError) as error:  # ValueError: no host can have such a name (IDNA)
            if isinstance(error, TimeoutError):
                raise
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
    return sock


async def _accept(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> tuple[socket.socket, tuple[Any, ...]]:
    while True:
        try:
            return await loop.sock_accept(listening)
        except OSError as error:  # out of file descriptors, or the peer left at once: neither ends the listener
            logger.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(0.05)


def check_here(config: KVTransferConfig, *, has_token: bool) -> None:
    """Raise `ConfigError` if this machine cannot listen on `kv_ip` and `kv_port` now. `has_token`: instances share a
    token."""
    _bind(config.kv_ip, config.kv_port, allow_remote=has_token).close()


def _bind(host: str, port: int, *, allow_remote: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not allow_remote and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"kv_ip {host} can be reached from other machines, so instances must authenticate each other with a"
                " shared token; set KVFERRY_AUTH_TOKEN in the environment of all of them, or use kv_ip 127.0.0.1"
            )
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no host can have such a name
        raise ConfigError(f"cannot listen on kv_ip {host}, kv_port {port}: {error}") from error
    listening.setblocking(False)
    return listening


def _reachable_host(host: str, listening: socket.socket) -> str:
    bound: str = listening.getsockname()[0]
    if not ipaddress.ip_address(bound).is_unspecified:
        return host
    outside_address = ("192.0.2.1", 9) if listening.family == socket.AF_INET else ("2001:db8::1", 9)
    with suppress(OSError), socket.socket(listening.family, socket.SOCK_DGRAM) as probe:
        probe.connect(outside_address)  # nothing is sent: it only chooses the interface that leads outwards
        source_host: str = probe.getsockname()[0]
        return source_host
    return socket.gethostname()
