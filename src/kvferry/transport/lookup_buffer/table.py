"""Which lookup buffer an instance's configuration asks for, and the one place that builds it.

    kv_connector_extra_config.lookup_buffer   .transport
    "fabric"   (for a fabric's name)          "auto", "shm", "tcp", …        one-sided reads
    "pipe"     (for any other name)           "gloo", "nccl", a pipe's name  asked for, and sent down a pipe
    "valkey"                                                                 a key-value server, at `valkey_url`

A pipe whose name is also a fabric's is meant with "pipe-" before it: "pipe-tcp".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext
from kvferry.transport.fabric.table import FABRICS, LIBRARIES, MAX_STREAMS, OPTIONS, build_fabrics, fabric_class
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.offering import OfferingBuffer
from kvferry.transport.memory import BlockMemory
from kvferry.transport.pipe.table import pipe_class, pipe_names
from kvferry.transport.tls import EXTRAS as TLS_EXTRAS
from kvferry.transport.tls import ChannelTls, channel_tls, require_covered
from kvferry.transport.wire import Identity

_DEFAULTS: dict[str, Any] = {
    "checksum": False,
    "advertise_host": "",
    "advertise_port": 0,
    "streams": 1,
    "backends": ["UCX"],
    "num_threads": 0,
    "protocol": "",
    "device_name": "",
}
"""The types of options, for a check of them before whoever reads them is there."""

BUFFERS = ("fabric", "pipe", "valkey")
PIPE_PREFIX = "pipe-"
EXTRAS = (
    "lookup_buffer",
    "transport",
    "checksum",
    "valkey_url",
    "advertise_host",
    "advertise_port",
    *OPTIONS,
    *TLS_EXTRAS,
)
"""Keys of `kv_connector_extra_config` that are read here."""


@dataclass(frozen=True)
class LookupBufferContext:
    """What a lookup buffer is built from."""

    config: KVTransferConfig
    memory: BlockMemory
    identity: Identity
    token: str
    bounds: EntryBounds


def build_lookup_buffer(context: LookupBufferContext) -> OfferingBuffer:
    """The lookup buffer that the configuration asks for. The caller runs it, and closes it.

    Raises `UnknownName`, or `ConfigError` when what is asked for does not work here.
    """
    config = context.config
    tls = channel_tls(config.kv_connector_extra_config)
    if buffer_name(config) == "valkey":
        from kvferry.transport.lookup_buffer.valkey.buffer import ValkeyLookupBuffer  # its package is an extra

        _require_no_tls(tls)
        return ValkeyLookupBuffer(context.memory, _valkey_url(config), context.token, context.bounds)
    listener = Listener(
        context.identity,
        context.token,
        config.kv_ip,
        config.kv_port,
        advertised_host=config.extra("advertise_host", ""),
        advertised_port=config.extra("advertise_port", 0),
        tls=tls,
    )
    try:
        return _reading(
            context,
            FabricContext(
                context.memory, listener, context.identity, context.token, config.kv_connector_extra_config, tls
            ),
        )
    except BaseException:
        listener.close()
        raise


def check_lookup_buffer(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for what can be known to be wrong with the configuration before anything is built: names,
    types, files, and libraries that are not installed."""
    for key, default in _DEFAULTS.items():
        config.extra(key, default)
    if not 0 <= config.extra("advertise_port", 0) <= 65535:
        raise ConfigError("kv_connector_extra_config.advertise_port must be between 0 and 65535")
    if not 1 <= config.extra("streams", 1) <= MAX_STREAMS:
        raise ConfigError(f"kv_connector_extra_config.streams must be 1 to {MAX_STREAMS}")
    tls = channel_tls(config.kv_connector_extra_config)
    match buffer_name(config):
        case "valkey":
            _valkey_url(config)
            require_library("lookup_buffer valkey", "valkey", "valkey", ["valkey"])
            _require_no_tls(tls)
        case "pipe":
            name = _pipe_name(_transport(config))
            if tls is not None:  # only then, since it brings torch
                require_covered(tls, f"pipe {name}", covered=pipe_class(name).under_tls)
        case _:
            _check_transport(_transport(config), tls)


def _check_transport(transport: str, tls: ChannelTls | None) -> None:
    if transport == "auto":
        return
    if transport not in FABRICS:
        raise UnknownName("transport", transport, ["auto", *FABRICS])
    if transport in LIBRARIES:
        require_library(f"transport {transport}", *LIBRARIES[transport])
    require_covered(tls, f"transport {transport}", covered=fabric_class(transport).under_tls)


def _require_no_tls(tls: ChannelTls | None) -> None:
    if tls is not None:
        raise ConfigError(
            "kv_connector_extra_config.tls_cert: with lookup_buffer valkey instances do not speak to each other; the"
            ' TLS of the server is asked for by its URL, as in "valkeys://host:6379"'
        )


def buffer_name(config: KVTransferConfig) -> str:
    """One of `BUFFERS`. Raises `UnknownName`."""
    default = "fabric" if _transport(config) in ("auto", *FABRICS) else "pipe"
    name: str = config.extra("lookup_buffer", default)
    if name not in BUFFERS:
        raise UnknownName("lookup_buffer", name, BUFFERS)
    return name


def needs_address(config: KVTransferConfig) -> bool:
    """Whether a consumer must know where its producer is."""
    return buffer_name(config) != "valkey"


def _reading(context: LookupBufferContext, fabric_context: FabricContext) -> OfferingBuffer:
    """With a listener: what is announced is read by the consumer."""
    config, transport = context.config, _transport(context.config)
    if buffer_name(config) == "pipe":
        from kvferry.transport.lookup_buffer.pipe import PipeLookupBuffer  # torch only where a pipe is used

        pipe = _pipe_name(transport)
        return PipeLookupBuffer(fabric_context, pipe, context.bounds, checksum=_checksum(config))
    fabrics = build_fabrics(transport, fabric_context)
    return FabricLookupBuffer(fabric_context, fabrics, context.bounds, checksum=_checksum(config))


def _checksum(config: KVTransferConfig) -> bool | None:
    """What the user says, if anything."""
    given = "checksum" in config.kv_connector_extra_config
    return config.extra("checksum", False) if given else None


def _transport(config: KVTransferConfig) -> str:
    name: str = config.extra("transport", "auto")
    return name


def _valkey_url(config: KVTransferConfig) -> str:
    """`kv_port` cannot name the server: each rank and each instance of a fleet has its own."""
    url: str = config.extra("valkey_url", "")
    if not url:
        raise ConfigError(
            "lookup_buffer valkey needs the server: set kv_connector_extra_config.valkey_url, as in"
            ' "valkey://127.0.0.1:6379" or "unix:///run/valkey.sock"'
        )
    return url


def _pipe_name(transport: str) -> str:
    name = transport.removeprefix(PIPE_PREFIX)
    if ":" not in name and name not in pipe_names():
        raise UnknownName("transport", transport, ["auto", *FABRICS, *(PIPE_PREFIX + pipe for pipe in pipe_names())])
    return name
