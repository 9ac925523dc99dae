"""Checks that addresses can be listened on, before anything is started."""

from __future__ import annotations

import socket

from kvferry.core.errors import ConfigError


def require_free(host: str, port: int, flag: str = "--port") -> None:
    """Raise `ConfigError` if `port` of `host` cannot be listened on now. `flag`: the flag that set the port. Port 0 is
    always free, but the host must belong to this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            listener.bind(address)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--host {host} is not an address: {reason}; 127.0.0.1 is this machine's own") from error
    except OSError as error:
        other = " or another --host" if flag == "--port" else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}{other}") from error
