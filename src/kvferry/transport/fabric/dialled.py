"""What fabrics have in common that read a peer over connections to its listener: the peer sends what is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.core.errors import KvferryError, ProtocolError
from kvferry.transport.fabric.base import Fabric


class DialledFabric(Fabric):
    """A fabric that reads a peer over connections to the peer's listener."""

    def describe(self) -> dict[str, Any]:
        """Where the listener is."""
        return {"host": self.context.listener.host, "port": self.context.listener.port}

    def reachable(self, description: dict[str, Any]) -> bool:
        """Always, as far as can be told without trying."""
        return "port" in description

    def address_in(self, description: dict[str, Any]) -> tuple[str, int]:
        """Where a peer listens. Raises `ProtocolError` when its description does not say."""
        host, port = description.get("host"), description.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            raise ProtocolError(f"a {self.name} description without host and port")
        return host, port


class PendingRead:
    """A read that was asked for of a peer which sends, and whether anybody still waits for it. Made on the loop."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def given_up(self) -> bool:
        """Nobody wants what still comes: a wait for `done` that is cancelled cancels it."""
        return self.done.done()

    def finish(self, error: KvferryError | None = None) -> None:
        """Wake the reader, unless it gave up."""
        if self.given_up:
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
