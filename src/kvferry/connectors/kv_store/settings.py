"""What a user sets for the shared storage connector, read and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.connectors.api import ConnectorContext
from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.store.access import ACCESS, Access

EXTRAS = ("shared_storage_path", "max_bytes", "load", "timeout_s", "fsync", "access")
LOADS = ("async", "layerwise")
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class StorageSettings:
    """`kv_connector_extra_config` of this connector. Bytes, seconds."""

    path: Path
    """`shared_storage_path`, vLLM's key: a directory that all instances share."""

    max_bytes: int | None
    """Bound of the whole directory; None: as much as the disk takes."""

    layerwise: bool
    """`load` "layerwise": the model starts at once and waits for each layer; "async": when all has come."""

    timeout_s: float
    """Longest wait for a hand-off's prefill, and for the blocks of one request."""

    fsync: bool
    """Whether blocks survive a power failure as soon as a hand-off is announced."""

    access: Access
    """`access` "owner": only this user reads and writes there; "group": its group too, as far as the umask lets it."""


def read_settings(context: ConnectorContext) -> StorageSettings:
    """Raises `ConfigError` that names the key."""
    return _read(context.config, context.layout.tp_size)


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all that can be known to be wrong before there is an engine."""
    path = _read(config, tp_size=1).path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"kv_connector_extra_config.shared_storage_path {path} is not a directory")


def _read(config: KVTransferConfig, tp_size: int) -> StorageSettings:
    config.require_extras_known(EXTRAS)
    path = config.extra("shared_storage_path", "")
    if not path:
        raise ConfigError(
            "SharedStorageConnector needs kv_connector_extra_config.shared_storage_path: a directory that all"
            " instances share"
        )
    max_bytes = config.extra("max_bytes", 0)
    if max_bytes < 0:
        raise ConfigError(f"kv_connector_extra_config.max_bytes must be at least 0, got {max_bytes}")
    load = config.extra("load", "async")
    if load not in LOADS:
        raise UnknownName("kv_connector_extra_config.load", load, LOADS)
    if load == "layerwise" and tp_size > 1:
        raise ConfigError(
            "kv_connector_extra_config.load layerwise works on one rank only: where one rank's blocks do not come, the"
            " others would keep what they computed without them; leave it out, or serve without tensor parallelism"
        )
    timeout_s = config.extra("timeout_s", TIMEOUT_S)
    if not timeout_s > 0:
        raise ConfigError(f"kv_connector_extra_config.timeout_s must be greater than 0, got {timeout_s:g}")
    access = config.extra("access", "owner")
    if access not in ACCESS:
        raise UnknownName("kv_connector_extra_config.access", access, ACCESS)
    return StorageSettings(
        Path(path), max_bytes or None, load == "layerwise", timeout_s, config.extra("fsync", False), ACCESS[access]
    )
