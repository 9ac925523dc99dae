"""Connectors of other systems, and their keys, that kvferry does not have, each with a description and its replacement.
An error that suggests the most similar name of kvferry's would mislead."""

from __future__ import annotations

from kvferry.core.errors import ConfigError

_OFFLOADS = "use OffloadingConnector, which keeps blocks in host memory"
_STORES = 'use KVStoreConnector with "store" in kv_connector_extra_config'
_ONLY_IN_VLLM = "it is available with --engine vllm, where vLLM has it"

CONNECTORS = {
    "ExampleConnector": "vLLM's name for what was SharedStorageConnector; use SharedStorageConnector",
    "MooncakeStoreConnector": f'vLLM\'s cache in a Mooncake store; {_STORES}: "mooncake://HOST:PORT" of its master',
    "NixlPullConnector": "vLLM's NIXL connector with D reading; use NixlConnector, which does the same",
    "NixlPushConnector": "vLLM's NIXL connector with P writing; use NixlConnector, with which D reads",
    "MoRIIOConnector": f"vLLM's connector for AMD's GPUs over MoRI-IO; {_ONLY_IN_VLLM}",
    "NeuronConnector": "a connector of vLLM for AWS Neuron; kvferry has no engine for these devices",
    "TPUConnector": "a connector of vLLM for TPUs; kvferry has no engine for these devices",
    "LLMDataDistConnector": "a connector of vLLM for Ascend; kvferry has no engine for these devices",
    "LMCacheMPConnector": 'vLLM\'s connector to an LMCache server; use LMCacheConnector with "store": "lmcache://HOST:PORT"',
    "SimpleCPUOffloadConnector": f"vLLM's offloading to host memory; {_OFFLOADS}",
    "HF3FSKVConnector": f"vLLM's cache in DeepSeek's 3FS; {_STORES}: \"file:/PATH\" on a mounted 3FS",
    "FlexKVConnectorV1": f"vLLM's connector to FlexKV; {_ONLY_IN_VLLM}",
    "HiSparseConnector": f"vLLM's offloading for sparse attention; {_ONLY_IN_VLLM}",
    "DecodeBenchConnector": "for measuring decode in vLLM, with KV that is made up; kvferry never uses such KV",
    "ExampleHiddenStatesConnector": f"vLLM's writer of hidden states, which moves no KV; {_ONLY_IN_VLLM}",
    "PyNcclConnector": "a connector of vLLM's V0 engine; use P2pNcclConnector, or P2pConnector",
}
"""Texts by connector name. They follow "kv_connector 'NAME' is"."""

_OF_NCCL = "a key of vLLM's P2pNcclConnector"
KEYS = {
    "nccl_num_channels": f"{_OF_NCCL}; set NCCL_MAX_NCHANNELS in the environment instead",
    "send_type": f"{_OF_NCCL}, which kvferry does not need: D reads, layer by layer; leave it out",
    "mem_pool_size_gb": f"{_OF_NCCL}; kvferry's limit is kv_buffer_size, in bytes, beside kv_connector_extra_config",
    "proxy_ip": f"{_OF_NCCL}, for its proxy; instances register at kvferry's router with --register; leave it out",
    "proxy_port": f"{_OF_NCCL}, for its proxy; instances register at kvferry's router with --register; leave it out",
    "http_port": f"{_OF_NCCL}, for its proxy; kvferry has the port of --port; leave it out",
    "enforce_handshake_compat": "a key of vLLM's NixlConnector; kvferry always compares layouts; leave it out",
}
"""Texts by key of `kv_connector_extra_config`. They follow "kv_connector_extra_config.KEY is"."""


def refuse_connector(name: str) -> None:
    """Raise `ConfigError` if this is a connector of another system."""
    if hint := CONNECTORS.get(name):
        raise ConfigError(f"kv_connector {name!r} is {hint}")


def refuse_keys(extra: dict[str, object], own_keys: set[str]) -> None:
    """Raise `ConfigError` for a key of another system's connectors that is not one of `own_keys`."""
    for key in extra:
        if key not in own_keys and (hint := KEYS.get(key)):
            raise ConfigError(f"kv_connector_extra_config.{key} is {hint}")
