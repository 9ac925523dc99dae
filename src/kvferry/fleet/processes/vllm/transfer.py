"""The `--kv-transfer-config` of each vLLM server, made from the one that the user gave for all, or from the default."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from kvferry.connectors.foreign import refuse_connector
from kvferry.connectors.registry import BUILTIN, VLLM_HAND_OFF_CONNECTORS, connector_names, find_connector
from kvferry.core.errors import ConfigError, MissingDependency, UnknownName
from kvferry.core.messages.registration import Role
from kvferry.core.settings.transfer_config import KVTransferConfig, read_transfer_json
from kvferry.fleet.processes.vllm.environment import VllmEnvironment, require_module
from kvferry.fleet.spec.kv_transfer import InstanceRole, hand_off_role, kv_role, require_kv_role
from kvferry.transport.fabric.base import GPU_TRANSPORTS

VLLM_NAMES = {name: f"Kvferry{name}" for name in ("P2pConnector", "SharedStorageConnector", "KVStoreConnector")}
"""kvferry's connectors without a vLLM connector of the same name, and their names in vLLM."""

KVFERRY_PREFIX, MULTI_CONNECTOR = "Kvferry", "MultiConnector"
"""How the names of kvferry's connectors begin in vLLM; and the name of a connector that joins several."""


_EXTRA_IN_VLLM = ("kv_ip", "kv_buffer_size")
ADAPTER_KEYS = (*_EXTRA_IN_VLLM, "hand_off", "shared_memory", "mix_kernels", "model_fingerprint")
"""Keys of `kv_connector_extra_config` that kvferry's adapter for vLLM reads itself (`adapters.vllm.settings`)."""

_HAND_OFF_CONNECTORS = ("P2pConnector", "P2pNcclConnector", "NixlConnector", "MooncakeConnector")
"""Connectors, kvferry's and vLLM's, whose `kv_role` distinguishes P from D. The `kv_role` of a cache decides whether it
saves or loads; P and D may do both."""

_PACKAGE_OF_CONNECTOR = {"Nixl": "nixl", "Mooncake": "mooncake", "LMCache": "lmcache"}
"""The package that a connector of vLLM's imports, by a part of the connector's name."""

_GPU_ONLY = (
    f"{KVFERRY_PREFIX}P2pNcclConnector",
    "MooncakeConnector",
    "LMCacheConnectorV1",
    "GDS",
    "GDS_MT",
    "GPUNETIO",
)
"""Connectors, and backends of NIXL, that move the memory of GPUs only. On a server without a GPU, LMCache's connector
stores and loads nothing, without an error."""

DEFAULT_TRANSFER = '{"kv_connector":"P2pConnector"}'


def read_transfer(text: str) -> dict[str, Any]:
    """Read a `--kv-transfer-config`, and replace the names of kvferry's connectors by their names in vLLM. Raises
    `ConfigError` for wrong settings of kvferry's connectors; vLLM checks everything else."""
    raw = read_transfer_json(text)
    if not isinstance(raw.get("kv_connector"), str):
        raise ConfigError('--kv-transfer-config names no "kv_connector"')
    transfer = _with_vllm_names(raw)
    children = () if transfer["kv_connector"] == KVFERRY_PREFIX + MULTI_CONNECTOR else _children(transfer)
    for connector in (transfer, *children):
        _check_kvferry_connector(connector)
    return transfer


def _with_vllm_names(transfer: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the names of kvferry's connectors in vLLM. A MultiConnector becomes kvferry's own if all
    its connectors are kvferry's and vLLM has no connector of the same name for at least one of them."""
    name, children = transfer["kv_connector"], _children(transfer)
    names = [child["kv_connector"] for child in children]
    if name == MULTI_CONNECTOR and VLLM_NAMES.keys() & names and set(names) <= set(connector_names()):
        return {**transfer, "kv_connector": KVFERRY_PREFIX + name}
    if name == MULTI_CONNECTOR and children:
        extra = transfer["kv_connector_extra_config"]
        joined = {**extra, "connectors": [_with_vllm_names(child) for child in children]}
        return {**transfer, "kv_connector_extra_config": joined}
    return {**transfer, "kv_connector": VLLM_NAMES.get(name, name)}


def _check_kvferry_connector(transfer: dict[str, Any]) -> None:
    """Raise `ConfigError` for wrong settings of one of kvferry's connectors. Does not check which libraries, and which
    connectors of other packages, are installed in vLLM's environment."""
    name = transfer["kv_connector"].removeprefix(KVFERRY_PREFIX)
    if not transfer["kv_connector"].startswith(KVFERRY_PREFIX):
        return
    if name not in connector_names():
        if near := get_close_matches(name, connector_names(), n=1, cutoff=0.8):
            raise UnknownName("kv_connector", transfer["kv_connector"], [KVFERRY_PREFIX + near[0]])
        return
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError("--kv-transfer-config: kv_connector_extra_config must be an object")
    config = _kvferry_config(transfer)
    with suppress(MissingDependency):
        find_connector(config).check(config)


def _kvferry_config(transfer: dict[str, Any]) -> KVTransferConfig:
    """The configuration of a connector of kvferry's, without the keys that the adapter for vLLM reads."""
    extra = transfer.get("kv_connector_extra_config", {})
    options = {key: value for key, value in extra.items() if key not in ADAPTER_KEYS}
    return KVTransferConfig(
        kv_connector=transfer["kv_connector"].removeprefix(KVFERRY_PREFIX), kv_connector_extra_config=options
    )


def require_usable_connectors(
    transfer: dict[str, Any], environment: VllmEnvironment, arguments: tuple[str, ...]
) -> None:
    """Raise `ConfigError` for connectors that cannot work in this environment: vLLM itself fails only after it has
    loaded the model. `arguments`: the arguments of `vllm serve`."""
    name, extra = transfer["kv_connector"], transfer.get("kv_connector_extra_config")
    extra, is_foreign = extra if isinstance(extra, dict) else {}, not name.startswith(KVFERRY_PREFIX)
    if (
        is_foreign
        and environment.connectors
        and name not in environment.connectors
        and "kv_connector_module_path" not in transfer
    ):
        refuse_connector(name)
        names = [*environment.connectors, *(KVFERRY_PREFIX + name for name in connector_names())]
        raise UnknownName(f"kv_connector of vLLM {environment.version}", name, names)
    package = next((needed for part, needed in _PACKAGE_OF_CONNECTOR.items() if part in name), None)
    if is_foreign and package in environment.missing_libraries:
        raise ConfigError(f"{name} needs {package}, which is not installed in the environment of {environment.python}")
    own_name = () if "kv_connector_module_path" in transfer else (name,)
    needs_gpus = [name for name in (*own_name, *extra.get("backends", ())) if name in _GPU_ONLY]
    if environment.on_cpu and needs_gpus:
        raise ConfigError(
            f"--kv-transfer-config: {needs_gpus[0]} is for GPUs, and vLLM in the environment of {environment.python} is"
            " built for CPUs"
        )
    transport = extra.get("transport") if not is_foreign else None
    if environment.on_cpu and transport in GPU_TRANSPORTS:
        raise ConfigError(
            f"--kv-transfer-config: transport {transport!r} is for GPUs, and vLLM in the environment of"
            f" {environment.python} is built for CPUs; leave it out"
        )
    if (module := transfer.get("kv_connector_module_path")) is not None:
        require_module(environment.python, str(module))
    gives_size = extra.keys() & {"cpu_bytes_to_use", "spec_name"} or any(
        "offloading" in argument for argument in arguments
    )
    if name == "OffloadingConnector" and not gives_size:
        raise ConfigError(
            '--kv-transfer-config: vLLM\'s OffloadingConnector needs "cpu_bytes_to_use" in kv_connector_extra_config,'
            " the bytes of host memory that it may use"
        )
    if not is_foreign and name.removeprefix(KVFERRY_PREFIX) in BUILTIN:
        with suppress(MissingDependency):  # vLLM's environment may have it
            find_connector(config := _kvferry_config(transfer)).check_here(config, has_token=True)
    elif is_foreign:
        for child in _children(transfer):
            require_usable_connectors(child, environment, arguments)
        if name == MULTI_CONNECTOR:
            _require_one_hand_off(_children(transfer))


def _require_one_hand_off(children: list[dict[str, Any]]) -> None:
    """Raise `ConfigError` if vLLM's MultiConnector has no connectors, or several that make tickets: kvferry's adapter
    allows only one. A cache of kvferry's makes no tickets if one of vLLM's connectors does."""
    if not children:
        raise ConfigError(
            f'--kv-transfer-config: vLLM\'s {MULTI_CONNECTOR} needs "connectors" in kv_connector_extra_config, the'
            " list of the connectors that it joins"
        )
    names = [
        child["kv_connector"] for child in children if (child.get("kv_connector_extra_config") or {}).get("hand_off", 1)
    ]
    kvferry_names = [
        name for name in names if name.removeprefix(KVFERRY_PREFIX) in BUILTIN and name.startswith(KVFERRY_PREFIX)
    ]
    vllm_names = [name for name in names if name in VLLM_HAND_OFF_CONNECTORS]
    if len(kvferry_names) > 1:
        raise ConfigError(
            f"--kv-transfer-config: {kvferry_names[0]} and {kvferry_names[1]} would both hand requests off; give all"
            ' but one "hand_off": false in its kv_connector_extra_config'
        )
    if kvferry_names and vllm_names and _hands_off(kvferry_names[0]):
        raise ConfigError(
            f"--kv-transfer-config: {vllm_names[0]} and {kvferry_names[0]} would both hand requests off; remove one"
        )


def needs_plugin(transfer: dict[str, Any]) -> bool:
    """True if vLLM needs kvferry's plugin for this configuration."""
    return transfer["kv_connector"].startswith(KVFERRY_PREFIX) or any(map(needs_plugin, _children(transfer)))


def has_bootstrap_server(transfer: dict[str, Any]) -> bool:
    """True if vLLM's MooncakeConnector is used: a prefill instance then has a bootstrap server."""
    return any(map(has_bootstrap_server, _children(transfer))) or bool(transfer["kv_connector"] == "MooncakeConnector")


def has_lmcache(transfer: dict[str, Any]) -> bool:
    """True if one of LMCache's own connectors is used."""
    return any(has_lmcache(child) for child in _children(transfer)) or transfer["kv_connector"].startswith("LMCache")


def require_registrable(transfer: dict[str, Any], role: Role) -> None:
    """Raise `ConfigError` if a `kv_role` excludes the role that the server registers for. Also checks kvferry's
    connectors that hand off through a store, and the one in kvferry's MultiConnector that hands off."""
    transfer_for_member(transfer, role, "", 0)
    extra = transfer.get("kv_connector_extra_config", {})
    if not transfer["kv_connector"].startswith(KVFERRY_PREFIX) or extra.get("hand_off") is False:
        return
    own_role = transfer.get("kv_role", kv_role(role))
    require_kv_role(own_role, role)
    if transfer["kv_connector"] == KVFERRY_PREFIX + MULTI_CONNECTOR:
        options = {key: value for key, value in extra.items() if key not in ADAPTER_KEYS}
        config = KVTransferConfig(kv_connector=MULTI_CONNECTOR, kv_role=own_role, kv_connector_extra_config=options)
        with suppress(MissingDependency):
            require_kv_role(hand_off_role(config), role)


def transfer_for_member(
    transfer: dict[str, Any], role: InstanceRole, name: str, index: int, node: str = ""
) -> dict[str, Any]:
    """The configuration of instance `index`: the user's settings, and the values that must differ between instances.
    `node`: the address of its node, at which other instances fetch the KV of kvferry's connectors. vLLM's own
    connectors get the address from environment variables.

    `kv_load_failure_policy` is `recompute` unless the user sets it, as in kvferry's own engine.
    """
    if node:
        transfer = _with_node_address(node, transfer)
    member_transfer = {"kv_load_failure_policy": "recompute", **_with_roles(_move_adapter_keys(transfer), role)}
    if member_transfer.get("engine_id"):
        member_transfer["engine_id"] = f"{member_transfer['engine_id']}-{name}"
    if member_transfer.get("kv_port"):
        member_transfer["kv_port"] += index
    return member_transfer


def _with_node_address(node: str, transfer: dict[str, Any]) -> dict[str, Any]:
    """Set the address of the node in kvferry's connectors, unless the user has set one."""
    extra, children = transfer.get("kv_connector_extra_config", {}), _children(transfer)
    if transfer["kv_connector"].startswith(KVFERRY_PREFIX):
        return {**transfer, "kv_connector_extra_config": {"kv_ip": node, **extra}}
    if not children:
        return transfer
    return {
        **transfer,
        "kv_connector_extra_config": {**extra, "connectors": [_with_node_address(node, c) for c in children]},
    }


def _move_adapter_keys(transfer: dict[str, Any]) -> dict[str, Any]:
    """For kvferry's connectors, move keys that vLLM's configuration does not have into `kv_connector_extra_config`."""
    if not transfer["kv_connector"].startswith(KVFERRY_PREFIX):
        return transfer
    moved = {key: transfer[key] for key in _EXTRA_IN_VLLM if key in transfer}
    rest = {key: value for key, value in transfer.items() if key not in moved}
    return (
        {**rest, "kv_connector_extra_config": {**rest.get("kv_connector_extra_config", {}), **moved}} if moved else rest
    )


def _with_roles(transfer: dict[str, Any], role: InstanceRole, *, beside_hand_off: bool = False) -> dict[str, Any]:
    """Add `kv_role`. A connector that does not hand off saves and loads in every role. So does a cache of kvferry's
    beside a connector of vLLM's that hands off. kvferry's MultiConnector sets the roles of its children itself. Raises
    `ConfigError` if a connector that hands off has the role of the other instances."""
    extra = transfer.get("kv_connector_extra_config")
    is_cache = transfer["kv_connector"].startswith(KVFERRY_PREFIX) and not _hands_off(transfer["kv_connector"])
    is_cache_only = (isinstance(extra, dict) and extra.get("hand_off") is False) or (is_cache and beside_hand_off)
    member_transfer = {"kv_role": "kv_both" if is_cache_only else kv_role(role), **transfer}
    if _hands_off(transfer["kv_connector"]) and not is_cache_only:
        require_kv_role(member_transfer["kv_role"], role)
    children = _children(transfer)
    if children and transfer["kv_connector"] != f"{KVFERRY_PREFIX}{MULTI_CONNECTOR}":
        extra = transfer["kv_connector_extra_config"]
        beside = any(child["kv_connector"] in _HAND_OFF_CONNECTORS for child in children)
        connectors = [_with_roles(child, role, beside_hand_off=beside) for child in children]
        member_transfer["kv_connector_extra_config"] = {**extra, "connectors": connectors}
    return member_transfer


def _hands_off(name: str) -> bool:
    return name.removeprefix(KVFERRY_PREFIX) in _HAND_OFF_CONNECTORS or name == KVFERRY_PREFIX + MULTI_CONNECTOR


def _children(transfer: dict[str, Any]) -> list[dict[str, Any]]:
    """The connectors that a MultiConnector joins."""
    extra = transfer.get("kv_connector_extra_config")
    connectors = extra.get("connectors") if isinstance(extra, dict) else None
    children = connectors if isinstance(connectors, list) else []
    return [child for child in children if isinstance(child, dict) and isinstance(child.get("kv_connector"), str)]
