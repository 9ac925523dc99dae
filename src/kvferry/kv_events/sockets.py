"""The only module that imports ZeroMQ; `pip install 'kvferry[events]'` brings it."""

from __future__ import annotations

import re
from typing import Any

from kvferry.core.errors import ConfigError, MissingDependency

_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.%*]+\]|[A-Za-z0-9_.*-]+):(\d{1,5}|\*)|ipc://.+")


def require_endpoint(endpoint: str, flag: str) -> str:
    """Check a ZeroMQ address. Raises `ConfigError` if its form is not supported here."""
    if not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"{flag} {endpoint!r} is not an address; write it as tcp://127.0.0.1:5557, or with port *")
    return endpoint


def zmq() -> Any:
    """The module of ZeroMQ. Raises `MissingDependency`."""
    try:
        import zmq
    except ImportError as error:
        raise MissingDependency("KV events", "pyzmq", "events") from error
    return zmq


def zmq_asyncio() -> Any:
    """ZeroMQ for asyncio. Raises `MissingDependency`."""
    zmq()
    from zmq import asyncio

    return asyncio
