"""The stage a server is in: accepting, draining (running requests may end), aborting (they may not)."""

from __future__ import annotations

from kvferry.core.errors import Unavailable


class Lifecycle:
    """Owns the stage. Used from the server's event loop only. `noun` is who ends: "server", "router"."""

    def __init__(self, noun: str = "server") -> None:
        self._noun = noun
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether no new request is taken."""
        return self._draining

    def require_accepting(self) -> None:
        """Raise `Unavailable` when the server is about to end."""
        if self._draining:
            raise Unavailable(f"the {self._noun} is shutting down")

    def drain(self) -> None:
        """Take no new request."""
        self._draining = True

    def abort_reason(self) -> Unavailable:
        """What a request is told that is ended because its grace is over."""
        return Unavailable(f"the {self._noun} is shutting down, and the request was not done in time")
