"""Listening sockets."""

from __future__ import annotations

import socket

from kvferry.core.errors import ConfigError

BACKLOG = 2048


def reserve(host: str, port: int, *, beside: bool = False) -> socket.socket:
    """Bind a socket that does not listen yet to a port of its own; port 0 takes any free one. Raises `ConfigError` if
    another process uses the port. `beside`: another process of this user has reserved the port, and keeps it."""
    if port and not beside:
        listen(host, port).close()  # two sockets that do not listen may share a port
    reserved = _bound(host, port, is_shared=beside)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # so that the line above fails for others
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # and succeeds with `beside`
    return reserved


def start_listening(reserved: socket.socket) -> None:
    """Listen on a reserved socket; may be repeated."""
    reserved.listen(BACKLOG)
    # Connections inherit it: those that wait after their end (TIME_WAIT) must not keep the next process off the port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 takes any free one. Raises `ConfigError` with the reason."""
    listener = _bound(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from error
    return listener


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on connections whose socket says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        # Accepted connections inherit it: a token must not wait for the acknowledgement of the previous one.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise _refused(host, port, error) from error
    return listener


def _refused(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"cannot listen on {authority(host, port)}: {reason}; choose another --host or --port")


def authority(host: str, port: int) -> str:
    """`host:port` as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
