"""One Mooncake transfer engine, in few words. Mooncake is imported here and nowhere else.

Owns the engine. Every method blocks, and keeps a core busy while it does; the GIL is given up meanwhile.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from typing import Any

from kvferry.core.errors import ConfigError, MissingDependency, UnknownName
from kvferry.transport.memory import Pieces

PROTOCOLS = ("tcp", "rdma", "efa", "nvlink", "cxl", "barex", "hip", "ascend")
"""Mooncake takes any word, and means TCP by those that it does not know."""
CALL_S = 5
"""How long a call waits for a peer that does not answer, beyond a second for each GiB; Mooncake takes no less."""


class MooncakeEngine:
    """`regions`, as (address, length), can be read by peers and read into; `location` is Mooncake's name for where
    they are. Raises `MissingDependency`, or `ConfigError` when the engine cannot be had."""

    def __init__(
        self, host: str, protocol: str, device_name: str, regions: Sequence[tuple[int, int]], location: str
    ) -> None:
        if protocol not in PROTOCOLS:
            raise UnknownName("Mooncake protocol", protocol, PROTOCOLS)
        self._engine = _import_engine()()
        if self._engine.initialize(f"{host}:0", "P2PHANDSHAKE", protocol, device_name):
            raise ConfigError(
                f"Mooncake cannot start with protocol {protocol!r} and device_name {device_name!r} on {host};"
                " its log on stderr says why"
            )
        if protocol == "rdma" and not _has_devices(self._engine.get_local_topology()):
            raise ConfigError("Mooncake finds no RDMA device for protocol 'rdma' here, and would use TCP")
        self.port: int = self._engine.get_rpc_port()
        for address, num_bytes in regions:
            if self._engine.register_memory(address, num_bytes, location):
                raise ConfigError(f"Mooncake cannot register {num_bytes} bytes of KV cache for protocol {protocol!r}")
        self._addresses = [address for address, _ in regions]

    def read(self, segment: str, pieces: Pieces) -> bool:
        """Read from the engine at `segment`, "host:port". False: it failed, and what of it is under way may still
        write to our memory until this engine is closed."""
        result: int = self._engine.batch_transfer_sync_read(
            segment, pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist()
        )
        return result == 0

    def close(self) -> None:
        """End it, and with it everything under way. Takes a second: its listener looks that often."""
        self._engine.batch_unregister_memory(self._addresses)
        del self._engine


def _has_devices(topology: str) -> bool:
    """From Mooncake's JSON: for each memory location, the devices to be preferred and all others."""
    places: dict[str, list[list[str]]] = json.loads(topology)
    return any(devices for lists in places.values() for devices in lists)


def _import_engine() -> Any:
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(CALL_S))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it logs each step on stderr otherwise
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise MissingDependency("transport mooncake", "mooncake-transfer-engine", "mooncake") from error
    except ImportError as error:
        raise ConfigError(f"Mooncake is installed but does not load, perhaps for lack of a library: {error}") from error
