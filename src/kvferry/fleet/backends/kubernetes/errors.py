"""What goes wrong with the API server of a cluster."""

from __future__ import annotations

from kvferry.core.errors import KvferryError

_FORBIDDEN = 403
_LATER = (408, 429)


class ClusterError(KvferryError):
    """The API server refuses something, or does not answer. `status`: the HTTP status of its answer; 0: there was
    none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Whether the same may succeed later: nobody answered, or whoever did could not, or has no room now."""
        no_room = self.status == _FORBIDDEN and "exceeded quota" in str(self)
        return self.status in (0, *_LATER) or self.status >= 500 or no_room
