"""The desired state of a fleet, in its controller: reads changes from the ledger."""

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
    """Number of the change that cannot be carried out; 0: none was refused."""

    number: int = 0
    reason: str = ""


class SpecFollower:
    """Owns the desired state that is in force. `failures`: cleared with each change, so that changed members are
    started at once."""

    def __init__(self, ledger: Ledger, backend: FleetBackend, failures: list[Failure]) -> None:
        self._ledger, self._backend, self._failures = ledger, backend, failures
        self._desired: DesiredState | None = None
        self.refused = ChangeRefused()

    @property
    def followed(self) -> DesiredState:
        """The last result of `refresh`."""
        assert self._desired is not None, "the controller looks for changes first"
        return self._desired

    def refresh(self) -> DesiredState:
        """The current desired state. A change that cannot be carried out here is refused, and the previous state stays
        in force. Raises `ConfigError` if there is no previous state."""
        before = self._desired
        if before is None:
            self._desired = desired = self._ledger.desired_state()
            self._backend.use(desired.fleet)
            return desired
        try:
            desired = self._ledger.desired_state()
        except ConfigError as error:
            return self._refuse(before.number, str(error), before)
        if desired.number in (before.number, self.refused.number):
            return before
        if not desired.deleted:
            try:
                if desired.fleet.backend.kind != before.fleet.backend.kind:
                    raise ConfigError("backend.kind cannot be changed: delete the fleet first, then apply the spec")
                self._backend.use(desired.fleet)
            except ConfigError as error:
                return self._refuse(desired.number, str(error), before)
            self._failures.clear()
            self._ledger.record("changed", reason=f"revision {desired.fleet.revision}")
        self._desired, self.refused = desired, ChangeRefused()
        return desired

    def _refuse(self, number: int, reason: str, before: DesiredState) -> DesiredState:
        if self.refused != ChangeRefused(number, reason):
            self.refused = ChangeRefused(number, reason)
            self._ledger.record("refused", reason=reason)
            logger.warning("the desired state cannot be reached here: %s", reason)
        return before
