"""The stage a server is in: accepting, draining (running requests may end), aborting (they may not)."""

from __future__ import annotations

from kvferry.core.errors import Unavailable


class Lifecycle:
    """Owns the stage. Used from the server's event loop only. `noun`: "server" or "router", for messages."""

    def __init__(self, noun: str = "server") -> None:
        self._noun = noun
        self.draining = False
        """No new requests are accepted."""

    def refusal(self) -> Unavailable:
        """The error for a new request while the server is `draining`."""
        return Unavailable(f"the {self._noun} is shutting down")

    def drain(self) -> None:
        """Accept no new requests."""
        self.draining = True

    def abort_reason(self) -> Unavailable:
        """The error for a request that is aborted because the grace period is over."""
        return Unavailable(f"the {self._noun} is shutting down, and the request did not finish in time")
