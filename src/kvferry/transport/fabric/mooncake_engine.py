"""One Mooncake transfer engine. Mooncake is imported here and nowhere else.

Owns the engine. Every method blocks and keeps a core busy, without the GIL.
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
"""Checked here, because Mooncake uses TCP for any word that it does not know."""
CALL_S = 5
"""Seconds that a call waits for an unresponsive peer, plus one for each GiB; Mooncake's minimum."""


class MooncakeEngine:
    """An engine with which `regions`, as (address, length), are registered; `location` is Mooncake's name for their
    memory. Raises `MissingDependency`, or `ConfigError` if the engine does not start."""

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
        """Read from the engine at `segment`, "host:port". False: it has failed, and may still write to our memory until
        this engine is closed."""
        result: int = self._engine.batch_transfer_sync_read(
            segment, pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist()
        )
        return result == 0

    def close(self) -> None:
        """End the engine, with all its transfers. Takes up to a second, the polling interval of its listener."""
        self._engine.batch_unregister_memory(self._addresses)
        del self._engine


def _has_devices(topology: str) -> bool:
    """True if Mooncake's JSON names a device: for each memory location, it lists preferred devices and all others."""
    devices_by_location: dict[str, list[list[str]]] = json.loads(topology)
    return any(devices for device_lists in devices_by_location.values() for devices in device_lists)


def _import_engine() -> Any:
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(CALL_S))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it logs each step on stderr otherwise
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise MissingDependency("transport mooncake", "mooncake-transfer-engine", "mooncake") from error
    except ImportError as error:
        raise ConfigError(f"Mooncake is installed but does not load, perhaps for lack of a library: {error}") from error
