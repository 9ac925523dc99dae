"""Kinds of pipe by name. A new one is one file and one line here, or an entry point of another package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.names import ExtensionPoint

if TYPE_CHECKING:
    from kvferry.transport.pipe.base import PipeKind, PipeSettings

PIPES = ExtensionPoint(
    "pipe",
    {"gloo": "kvferry.transport.pipe.gloo:GlooPipe", "nccl": "kvferry.transport.pipe.nccl:NcclPipe"},
    "kvferry.pipes",
)


def pipe_kind(name: str, settings: PipeSettings | None = None) -> PipeKind:
    """The kind of that name. Raises as `pipe_class`, and `ConfigError` when it does not work here."""
    from kvferry.transport.pipe.base import PipeSettings

    return pipe_class(name)(settings or PipeSettings())


def pipe_class(name: str) -> type[PipeKind]:
    """The class of that name. Raises `UnknownName`, or `ConfigError` when it is not a pipe."""
    from kvferry.transport.pipe.base import PipeKind  # only where a pipe is used

    found: type[PipeKind] = PIPES.find(name, PipeKind)
    return found
