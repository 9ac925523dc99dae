"""From vLLM's configuration to kvferry's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.transfer_config import KVTransferConfig

TOKEN_VARIABLE = "KVFERRY_AUTH_TOKEN"
VLLM_DEFAULT_PORT = 14579
"""What vLLM's `kv_port` is when nobody sets it; taken as "any free port"."""


@dataclass(frozen=True)
class AdapterSettings:
    """What the user set, in kvferry's words. The last four are keys of `kv_connector_extra_config` (as are `kv_ip` and
    `kv_buffer_size`, which vLLM has no keys for); all others there are the connector's own."""

    transfer: KVTransferConfig
    auth_token: str = ""
    hand_off: bool = True
    """False: the connector sees requests without their hand-off, as a cache beside another connector."""
    shared_memory: bool = True
    """Whether a KV cache in host memory is put into shared memory, so that others on the machine read it directly."""
    model_fingerprint: str = ""
    """Instead of the one that is made from the model's files."""

    @property
    def key(self) -> str:
        """Tells the connectors within one vLLM's MultiConnector apart."""
        return f"{self.transfer.kv_connector} {sorted(self.transfer.kv_connector_extra_config.items())}"


def read_settings(theirs: Any, connector_name: str, rank: int = 0) -> AdapterSettings:
    """`theirs` is vLLM's `KVTransferConfig`. A fixed `kv_port` is that of rank 0, the others follow.

    Raises `ConfigError` that names the key.
    """
    extra = dict(theirs.kv_connector_extra_config)
    port = 0 if theirs.kv_port == VLLM_DEFAULT_PORT else theirs.kv_port + rank
    transfer = KVTransferConfig(
        kv_connector=connector_name,
        kv_role=theirs.kv_role,
        kv_buffer_device=theirs.kv_buffer_device,
        kv_buffer_size=_take(extra, "kv_buffer_size", 1e9),
        kv_ip=_take(extra, "kv_ip", "127.0.0.1"),
        kv_port=port,
        engine_id=theirs.engine_id,
        kv_load_failure_policy=theirs.kv_load_failure_policy,
    )
    hand_off = _take(extra, "hand_off", True)
    shared_memory = _take(extra, "shared_memory", True)
    fingerprint = _take(extra, "model_fingerprint", "")
    transfer = msgspec.structs.replace(transfer, kv_connector_extra_config=extra)
    return AdapterSettings(transfer, os.environ.get(TOKEN_VARIABLE, ""), hand_off, shared_memory, fingerprint)


def publishes_events(vllm_config: Any) -> bool:
    """Whether vLLM was started with KV events (`--kv-events-config`)."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def _take(extra: dict[str, Any], key: str, default: Any) -> Any:
    value = extra.pop(key, default)
    wanted = (float, int) if isinstance(default, float) else type(default)
    if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise ConfigError(f"kv_connector_extra_config.{key} must be {type(default).__name__}, got {value!r}")
    return value
