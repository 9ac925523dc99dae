"""kvferry's settings from vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.keys import shared_token
from kvferry.core.settings.bounds import MAX_BYTES
from kvferry.core.settings.options import read_options
from kvferry.core.settings.transfer_config import KVTransferConfig

VLLM_DEFAULT_PORT = 14579
"""vLLM's default of `kv_port`; interpreted as "any free port"."""


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of `kv_connector_extra_config` that all connectors of kvferry have inside vLLM. All other keys are the
    connector's own options. `kv_ip` and `kv_buffer_size` are among these keys because vLLM has no such settings."""

    kv_ip: str = "127.0.0.1"
    """Address to listen on, as other instances reach it. The default can be reached from this machine only."""

    kv_buffer_size: Annotated[float, Meta(gt=0, le=MAX_BYTES)] = 1e9
    """Maximum bytes of blocks that P keeps for others; further prefills wait."""

    shared_memory: bool = True
    """Put a KV cache in host memory into shared memory, so that another process on the machine reads it directly."""

    hand_off: bool = True
    """`false`: use this connector as a cache only, beside another connector that hands off."""

    mix_kernels: bool = False
    """Unless the KV is float32: allow other kernels on the other instances, such as kernels of another kind of
    processor. Set it on all instances."""

    model_fingerprint: str = ""
    """A name for the weights, the same on all instances, instead of the digest of the checkpoint's files. The
    fingerprint still depends on the configuration."""


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of one connector. `auth_token`: KVFERRY_AUTH_TOKEN, or empty."""

    transfer: KVTransferConfig
    auth_token: str
    options: AdapterOptions

    @property
    def key(self) -> str:
        """Distinguishes the connectors within one MultiConnector of vLLM."""
        return f"{self.transfer.kv_connector} {sorted(self.transfer.kv_connector_extra_config.items())}"


def read_settings(vllm_transfer: Any, connector_name: str, worker: int = 0) -> AdapterSettings:
    """The settings of one connector. `vllm_transfer`: vLLM's `KVTransferConfig`; `worker`: index of this worker among
    the ranks of all data-parallel engines of the server. Worker 0 listens on a fixed `kv_port`, worker n on `kv_port` +
    n.

    Raises `ConfigError`, which names the key.
    """
    extra = vllm_transfer.kv_connector_extra_config
    names = AdapterOptions.__struct_fields__
    options = read_options(AdapterOptions, {key: value for key, value in extra.items() if key in names})
    transfer = KVTransferConfig(
        kv_connector=connector_name,
        kv_role=vllm_transfer.kv_role,
        kv_buffer_device=vllm_transfer.kv_buffer_device,
        kv_buffer_size=options.kv_buffer_size,
        kv_ip=options.kv_ip,
        kv_port=0 if vllm_transfer.kv_port == VLLM_DEFAULT_PORT else vllm_transfer.kv_port + worker,
        engine_id=vllm_transfer.engine_id,
        kv_load_failure_policy=vllm_transfer.kv_load_failure_policy,
        kv_connector_extra_config={key: value for key, value in extra.items() if key not in names},
    )
    return AdapterSettings(transfer, shared_token(), options)


def publishes_events(vllm_config: Any) -> bool:
    """True if vLLM was started with KV events (`--kv-events-config`)."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events
