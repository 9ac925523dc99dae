"""Settings that a process of kvferry's is started with: one document, which a supervisor hands over in memory
(`settings_descriptor`) and the process decodes. It parses no flags, and no secret is in a command line."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.model import Settings, decode, encode
from kvferry.core.settings.options import read_value
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.kv_transfer import InstanceRole
from kvferry.fleet.spec.settings import InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

MAX_DOCUMENT_BYTES = 4 * 2**20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Document = TypeVar("Document", bound=Settings)


class InstanceProcess(Settings, frozen=True, kw_only=True, tag="instance"):
    """One instance of kvferry's own engine. `instance.kv_transfer_config` is the instance's own, with its role;
    `page_tick_s`: seconds between two updates of its page at `/`, None without one."""

    role: InstanceRole
    engine: EngineConfig
    instance: InstanceSettings = InstanceSettings()
    listen: ListenSettings = ListenSettings()
    log: LogConfig = LogConfig()
    access: HttpAccess = HttpAccess()
    limits: HttpLimits = HttpLimits()
    page_tick_s: float | None = None

    @property
    def title(self) -> tuple[str, ...]:
        """The words after `kvferry` in the process's title, which `ps` shows."""
        return ("serve" if self.role == "both" else self.role, self.engine.model)


class RouterProcess(Settings, frozen=True, kw_only=True, tag="router"):
    """One router. `group`: the folder that all router processes of one port share; `listeners`: descriptors of sockets
    that it inherits and accepts connections on."""

    router: RouterConfig = RouterConfig()
    listen: ListenSettings = ListenSettings()
    log: LogConfig = LogConfig()
    access: HttpAccess = HttpAccess()
    limits: HttpLimits = HttpLimits()
    instance_access: InstanceAccess = InstanceAccess()
    group: Path | None = None
    listeners: tuple[int, ...] = ()

    @property
    def title(self) -> tuple[str, ...]:
        """The words after `kvferry` in the process's title, which `ps` shows."""
        return ("router",)


class JoiningRankProcess(Settings, frozen=True, kw_only=True, tag="rank"):
    """One further rank of an instance. `address`: HOST:PORT of the instance."""

    address: str
    log: LogConfig = LogConfig()

    @property
    def title(self) -> tuple[str, ...]:
        """The words after `kvferry` in the process's title, which `ps` shows."""
        return ("rank", self.address)


ProcessSettings = InstanceProcess | RouterProcess | JoiningRankProcess


def with_values(settings: Document, values: Mapping[str, Any]) -> Document:
    """A copy of the document with `values`: for each name, every struct of the document that has such a field gets the
    value. Values are as TOML has them (str, int, list, …). Raises `ConfigError`."""
    parts: dict[str, Any] = {}
    for name in settings.__struct_fields__:
        part = getattr(settings, name)
        if isinstance(part, Settings):
            types = {field.name: field.type for field in msgspec.structs.fields(type(part))}
            struct_values = {key: read_value(key, value, types[key]) for key, value in values.items() if key in types}
            if struct_values:
                parts[name] = msgspec.structs.replace(part, **struct_values)
    return msgspec.structs.replace(settings, **parts)


@contextmanager
def settings_descriptor(settings: ProcessSettings) -> Iterator[int]:
    """A descriptor from which a child process reads the document. It is sealed memory: no process can change it, and no
    path leads to it."""
    descriptor = os.memfd_create("kvferry-settings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, encode(settings))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def receive(descriptor: int) -> ProcessSettings:
    """Read the document from a descriptor of `handed_over`, and close the descriptor. Raises `ConfigError`."""
    try:
        content = os.pread(descriptor, MAX_DOCUMENT_BYTES, 0)
        os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"the settings of this process cannot be read: {error.strerror}") from error
    return read_document(content)


def read_document(content: bytes) -> ProcessSettings:
    """The document in these bytes. Raises `ConfigError`."""
    try:
        return decode(content, ProcessSettings)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the settings of this process are not what this release reads: {error}") from error
