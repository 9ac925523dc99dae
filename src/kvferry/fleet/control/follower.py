"""What a fleet is to be, as its controller follows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.fleet.control.backend import FleetBackend
from kvferry.fleet.control.facts import Failure
from kvferry.fleet.control.ledger import DesiredState, Ledger

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChangeRefused:
    """The change of this number cannot be carried out; 0: none was refused."""

    number: int = 0
    why: str = ""


class SpecFollower:
    """Owns what is followed. `failures`: forgotten with each change, since whoever changes something wants it tried."""

    def __init__(self, ledger: Ledger, backend: FleetBackend, failures: list[Failure]) -> None:
        self._ledger, self._backend, self._failures = ledger, backend, failures
        self._wanted: DesiredState | None = None
        self.refused = ChangeRefused()

    @property
    def followed(self) -> DesiredState:
        """What `look` has found last."""
        assert self._wanted is not None, "the controller looks for changes first"
        return self._wanted

    def look(self) -> DesiredState:
        """What is wanted now. A change that cannot be carried out here is refused, and what was wanted before holds.
        Raises `ConfigError` if nothing was."""
        before = self._wanted
        if before is None:
            self._wanted = wanted = self._ledger.wanted()
            self._backend.use(wanted.fleet)
            return wanted
        try:
            wanted = self._ledger.wanted()
        except ConfigError as error:
            return self._refuse(before.number, str(error), before)
        if wanted.number in (before.number, self.refused.number):
            return before
        if not wanted.deleted:
            try:
                if wanted.fleet.backend.kind != before.fleet.backend.kind:
                    raise ConfigError("backend.kind cannot be changed: delete the fleet first, then apply the spec")
                self._backend.use(wanted.fleet)
            except ConfigError as error:
                return self._refuse(wanted.number, str(error), before)
            self._failures.clear()
            self._ledger.note("changed", why=f"revision {wanted.fleet.revision}")
        self._wanted, self.refused = wanted, ChangeRefused()
        return wanted

    def _refuse(self, number: int, why: str, before: DesiredState) -> DesiredState:
        if self.refused != ChangeRefused(number, why):
            self.refused = ChangeRefused(number, why)
            self._ledger.note("refused", why=why)
            logger.warning("what is wanted now cannot be carried out here: %s", why)
        return before
