"""Which lookup buffer an instance's configuration asks for, and the one place that builds it."""

from __future__ import annotations

from kvferry.core.names import ExtensionPoint
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext
from kvferry.transport.options import TransportOptions

LOOKUP_BUFFERS = ExtensionPoint(
    "lookup_buffer",
    {"fabric": "kvferry.transport.lookup_buffer.fabric:FabricLookupBuffer"},
    "kvferry.lookup_buffers",
)


def lookup_buffer_class(settings: TransportOptions) -> type[LookupBuffer]:
    """The class that is asked for. Raises `UnknownName`, or `ConfigError` when it cannot be imported."""
    found: type[LookupBuffer] = LOOKUP_BUFFERS.find(settings.lookup_buffer, LookupBuffer)
    return found


def build_lookup_buffer(context: LookupBufferContext) -> LookupBuffer:
    """The lookup buffer that the configuration asks for. The caller runs it, and closes it.

    Raises `UnknownName`, or `ConfigError` when what is asked for does not work here.
    """
    return lookup_buffer_class(context.settings).build(context)


def check_lookup_buffer(settings: TransportOptions) -> None:
    """Raise `ConfigError` for what can be known to be wrong with the configuration before anything is built: names, and
    libraries that are not installed. Nothing is looked for that is named `module:Class`."""
    LOOKUP_BUFFERS.require_known(settings.lookup_buffer)
    if ":" not in settings.lookup_buffer:
        lookup_buffer_class(settings).check_settings(settings)
