"""The routers of a fleet: processes that accept connections on one listening socket and share one folder.

The backend has the socket, so a connection that comes while a router dies waits for another one, and is not refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kvferry.fleet.processes.cpu import thread_variables
from kvferry.fleet.processes.process import PROGRAM, ProcessSpec, RouterGroup
from kvferry.fleet.spec.arguments import KEY_FIELDS, to_arguments, variable_name
from kvferry.fleet.spec.settings import Listen
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import INSTANCE_VARIABLE, TEXT, LogConfig
from kvferry.router.config import RouterConfig

GROUP_FLAG, LISTENER_FLAG = "--group", "--listener"
_FOLLOWED = "instances_file"

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class RouterPlan:
    """The settings of all routers of one port; `router.workers` says how many there are."""

    router: RouterConfig
    listen: Listen
    access: HttpAccess
    limits: HttpLimits
    instance_access: InstanceAccess
    log: LogConfig = TEXT
    num_threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where they listen: for clients, and for operators if those have a port of their own."""
        public = (self.listen.host, self.listen.port)
        access = self.access
        return [public] if access.admin_port is None else [public, (access.admin_host, access.admin_port)]

    def process(self, name: str, group: RouterGroup, revision: str) -> ProcessSpec:
        """What to run for a router. Files are read once for each revision: after a change of one, a router that is
        started again would know other keys than the next."""
        copies = group.folder / f"files-{revision}"
        copies.mkdir(mode=0o700, exist_ok=True)
        router = _copied(self.router, copies)
        keys = [_copied(one, copies) for one in (self.access, self.instance_access)]
        configs = (router, self.listen, *keys, self.limits, self.log)
        command = (
            *PROGRAM,
            "router",
            *(argument for config in configs for argument in to_arguments(config, without=KEY_FIELDS)),
            f"{GROUP_FLAG}={group.folder}",
            *(f"{LISTENER_FLAG}={one}" for one in group.listeners),
        )
        return ProcessSpec(
            name=name,
            command=command,
            environment={
                **self.environment,
                **thread_variables(self.num_threads),
                **self._secrets(),
                INSTANCE_VARIABLE: name,
            },
            hidden=self.hidden,
            descriptors=group.listeners,
        )

    def _secrets(self) -> dict[str, str]:
        said: dict[str, Any] = {**vars(self.access), **vars(self.instance_access)}
        values = {name: said[name] for name in KEY_FIELDS if said[name]}
        return {
            variable_name(name): value if isinstance(value, str) else " ".join(value) for name, value in values.items()
        }


def _copied(config: Settings, folder: Path) -> Settings:
    """The same settings, with copies of their files; one that cannot be read is left to whoever reports its name."""
    changed = {}
    for one in fields(config):  # type: ignore[arg-type]
        path = getattr(config, one.name)
        if isinstance(path, Path) and one.name != _FOLLOWED:
            copy = folder / f"{one.name}{path.suffix}"
            with suppress(OSError):
                if not copy.exists():
                    draft = copy.with_name(f"{copy.name}.new")
                    draft.touch(mode=0o600)
                    shutil.copyfile(path, draft)
                    draft.rename(copy)
                changed[one.name] = copy
    return replace(config, **changed)  # type: ignore[type-var]
