"""The common base of fabrics that connect to a peer's listener, and let the peer send the requested bytes."""

from __future__ import annotations

from typing import Any

from kvferry.core.errors import ProtocolError
from kvferry.transport.fabric.base import Fabric


class DialledFabric(Fabric):
    """A fabric whose description of itself is the address of its listener."""

    def describe(self) -> dict[str, Any]:
        return {"host": self.context.listener.host, "port": self.context.listener.port}

    def reachable(self, description: dict[str, Any]) -> bool:
        """True if the peer has a listener; the network is not tried."""
        return "port" in description

    def address_in(self, description: dict[str, Any]) -> tuple[str, int]:
        """(host, port) of a peer's listener. Raises `ProtocolError` if its description has none."""
        host, port = description.get("host"), description.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            raise ProtocolError(f"a {self.name} description without host and port")
        return host, port
