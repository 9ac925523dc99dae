"""The routers of a fleet: processes that accept connections on one listening socket and share one folder.

The backend has the socket, so a connection that comes while a router dies waits for another one, and is not refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.core.settings.model import Settings
from kvferry.fleet.processes.cpu import thread_variables
from kvferry.fleet.processes.process import MEMBER, ProcessSpec, RouterGroup
from kvferry.fleet.processes.process_settings import RouterProcess
from kvferry.fleet.spec.settings import Listen
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import INSTANCE_VARIABLE, TEXT, LogConfig
from kvferry.router.config import RouterConfig

_FOLLOWED = "instances_file"

Kind = TypeVar("Kind", bound=Settings)


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
        """The process of a router. Files are read once for each revision: after a change of one, a router that is
        started again would know other keys than the next."""
        copies = group.folder / f"files-{revision}"
        copies.mkdir(mode=0o700, exist_ok=True)
        settings = RouterProcess(
            router=_copied(self.router, copies),
            listen=self.listen,
            log=self.log,
            access=_copied(self.access, copies),
            limits=self.limits,
            instance_access=_copied(self.instance_access, copies),
            group=group.folder,
            listeners=group.listeners,
        )
        return ProcessSpec(
            name=name,
            command=(*MEMBER, *settings.title),
            settings=settings,
            environment={**self.environment, **thread_variables(self.num_threads), INSTANCE_VARIABLE: name},
            hidden=self.hidden,
            descriptors=group.listeners,
        )


def _copied(config: Kind, folder: Path) -> Kind:
    """The same settings, with copies of their files; one that cannot be read is left to whoever reports its name."""
    changed = {}
    for name in config.__struct_fields__:
        path = getattr(config, name)
        if isinstance(path, Path) and name != _FOLLOWED:
            copy = folder / f"{name}{path.suffix}"
            with suppress(OSError):
                if not copy.exists():
                    draft = copy.with_name(f"{copy.name}.new")
                    draft.touch(mode=0o600)
                    shutil.copyfile(path, draft)
                    draft.rename(copy)
                changed[name] = copy
    return msgspec.structs.replace(config, **changed)
