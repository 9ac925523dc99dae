"""Kinds of pipe by name. A new one is one file and one line here, or an entry point of another package."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import resolve
from kvferry.transport.pipe.base import PipeKind, PipeSettings

ENTRY_POINT_GROUP = "kvferry.pipes"
PIPES = {
    "shm": "kvferry.transport.pipe.shm:ShmPipe",
    "tcp": "kvferry.transport.pipe.tcp:TcpPipe",
    "gloo": "kvferry.transport.pipe.gloo:GlooPipe",
    "nccl": "kvferry.transport.pipe.nccl:NcclPipe",
}


def pipe_kind(name: str, settings: PipeSettings | None = None) -> PipeKind:
    """The kind of that name. Raises as `pipe_class`, or `ConfigError` when it does not work here."""
    return pipe_class(name)(settings or PipeSettings())


def pipe_class(name: str) -> type[PipeKind]:
    """The class of that name: one of `PIPES`, an entry point of the group "kvferry.pipes", or `module:Class`.

    Raises `UnknownName`, or `ConfigError` when it is not a pipe.
    """
    found = _find(name)
    if not (isinstance(found, type) and issubclass(found, PipeKind)):
        raise ConfigError(f"pipe {name!r} must be a kvferry PipeKind, got {found!r}")
    return found


def pipe_names() -> list[str]:
    """All kinds that have a name."""
    return sorted({*PIPES, *entry_points(group=ENTRY_POINT_GROUP).names})


def _find(name: str) -> object:
    if ":" in name:
        return resolve(name)
    if name in PIPES:
        return resolve(PIPES[name])
    others = entry_points(group=ENTRY_POINT_GROUP)
    if name in others.names:
        return others[name].load()
    raise UnknownName("pipe", name, pipe_names())
