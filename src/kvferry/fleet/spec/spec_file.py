"""A fleet's spec as a file: read again whenever it changes, and written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import WAIT_S, FileTask, run_within
from kvferry.fleet.spec.fleet_spec import DesiredFleet, read_fleet

logger = logging.getLogger(__name__)


class SpecFile:
    """A file that may change while it is used, such as a mounted ConfigMap in Kubernetes. `read` reads it, and raises
    `ConfigError` if it is invalid. `before`: the fleet that an earlier process has read from this file."""

    def __init__(
        self, path: Path, read: Callable[[Path], DesiredFleet] = read_fleet, before: DesiredFleet | None = None
    ) -> None:
        """Raises `ConfigError` if the file is invalid and there is no `before`."""
        self._path, self._read = path, read
        self._looking, self._trouble = FileTask(path, self._look), ""
        self._seen = run_within(path, WAIT_S, self._stamp)
        try:
            self.fleet = read(path)
        except ConfigError as error:
            if before is None:
                raise
            self.fleet = before
            logger.error("the change is refused, and the previous spec stays in force: %s", error)

    async def follow(self) -> DesiredFleet:
        """The fleet that the file describes now. While the file is invalid, missing or cannot be read in time: the
        last valid one."""
        try:
            self.fleet = await self._looking.run()
        except ConfigError as error:
            if str(error) != self._trouble:
                logger.error("the previous spec stays in force: %s", error)
            self._trouble = str(error)
        else:
            self._trouble = ""
        return self.fleet

    def _look(self) -> DesiredFleet:
        if (stamp := self._stamp()) == self._seen:
            return self.fleet
        self._seen = stamp
        try:
            fleet = self._read(self._path)
        except ConfigError as error:
            logger.error("the change is refused, and the previous spec stays in force: %s", error)
            return self.fleet
        logger.info("%s has changed; the new spec is in force", self._path)
        return fleet

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def to_table(fleet: DesiredFleet) -> dict[str, Any]:
    """The tables from which `fleet_from` makes this fleet. Fields with their default values are left out."""
    table = _table(fleet)
    keys = table.pop("keys", {})
    for name in ("engine", "router"):
        if values := keys.get(name):
            table[name] = {**table.get(name, {}), **values}
    for role, values in keys.get("role", {}).items():
        table["role"][role] |= values
    return {**table, **keys.get("fleet", {})}


def _table(value: msgspec.Struct) -> dict[str, Any]:
    table = {}
    for field in msgspec.structs.fields(value):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if (item := getattr(value, field.name)) != default:
            table[field.encode_name] = _plain(item)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _table(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
