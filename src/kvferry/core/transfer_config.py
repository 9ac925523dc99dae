"""`--kv-transfer-config`: vLLM's JSON, with the same keys, so that a user's existing line works."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from kvferry.core.errors import ConfigError

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this instance takes part in moving KV. Sizes are bytes; ports of 0 mean any free one."""

    kv_connector: str
    kv_role: KVRole = "kv_both"
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = 1e9
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    engine_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}

    @property
    def produces(self) -> bool:
        """Whether KV leaves this instance."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def consumes(self) -> bool:
        """Whether KV comes to this instance."""
        return self.kv_role in ("kv_consumer", "kv_both")

    def extra(self, key: str, default: Any) -> Any:
        """A value of `kv_connector_extra_config`, of the default's type; `ConfigError` names the key otherwise."""
        return extra_value(self.kv_connector_extra_config, key, default)

    def require_extras_known(self, known: tuple[str, ...]) -> None:
        """Raise `ConfigError` on a `kv_connector_extra_config` key that the connector does not know."""
        for key in self.kv_connector_extra_config:
            if key not in known:
                raise ConfigError(_unknown_key(f"kv_connector_extra_config.{key}", key, known))


def extra_value(extras: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value of a `kv_connector_extra_config`, of the default's type. Raises `ConfigError` that names the key."""
    value = extras.get(key, default)
    try:
        return value if default is None else msgspec.convert(value, type(default), strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config.{key}: {error}") from error


def parse_transfer_config(text: str) -> KVTransferConfig:
    """Read the JSON of `--kv-transfer-config`. Raises `ConfigError` that names the key and the nearest known one."""
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--kv-transfer-config is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--kv-transfer-config must be a JSON object, got {type(raw).__name__}")
    known = KVTransferConfig.__struct_fields__
    for key in raw:
        if key not in known:
            raise ConfigError(_unknown_key(f"--kv-transfer-config: {key}", key, known))
    try:
        config = msgspec.convert(raw, KVTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-transfer-config: {error}") from error
    _require_bounds(config)
    return config


def _require_bounds(config: KVTransferConfig) -> None:
    if not 0 <= config.kv_port <= 65535:
        raise ConfigError(f"--kv-transfer-config: kv_port must be between 0 and 65535, got {config.kv_port}")
    if not config.kv_buffer_size > 0:
        raise ConfigError(f"--kv-transfer-config: kv_buffer_size must be above 0, got {config.kv_buffer_size:g}")


def _unknown_key(where: str, key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{where} is not a known key; {hint}"
