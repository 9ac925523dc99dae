"""Listening sockets."""

from __future__ import annotations

import socket

from kvferry.core.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int, *, reuse_port: bool = False, accepting: bool = True) -> socket.socket:
    """A listening TCP socket; port 0 takes any free one. `reuse_port`: several processes may listen on one port, and
    the kernel spreads connections among them. Not `accepting`: it only holds the port for others. Raises `ConfigError`
    with the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on connections whose socket says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit it: a token must not wait for the one before to be acknowledged.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        if accepting:
            listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        address = authority(host, port)
        raise ConfigError(f"cannot listen on {address}: {reason}; choose another --host or --port") from error
    return listener


def authority(host: str, port: int) -> str:
    """`host:port` as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
