"""`--kv-transfer-config`: vLLM's JSON with the same keys, so that an existing configuration works."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from kvferry.core import entropy
from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import MAX_BYTES, Bounds
from kvferry.core.settings.options import read_value, unknown_key
from kvferry.core.strict_json import STRICT

_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^@\s\"]*:[^@\s\"]+@")
BUFFER = Bounds(0, MAX_BYTES, above=True)
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The instance's part in moving KV. The docstring under each field is its meaning in the reference."""

    kv_connector: str
    """Name of the connector, or `module:attribute` for a `ConnectorSpec` that no installed package registers."""

    kv_role: KVRole = "kv_both"
    """Direction of KV: out of this instance (`kv_producer`), into it (`kv_consumer`), or both. Default of `kvferry
    prefill` and `kvferry decode`: the role that fits."""

    kv_buffer_device: str = "cpu"
    """Accepted because vLLM's configuration has it, and not used: KV is moved from where it is."""

    kv_buffer_size: float = 1e9
    """Most bytes of KV blocks that this instance keeps for others; further prefills wait."""

    kv_ip: str = "127.0.0.1"
    """Address that the connector listens on, as other instances reach it. The default can be reached from the same
    machine only; any other address needs `KVFERRY_AUTH_TOKEN`."""

    kv_port: int = 0
    """Port that the connector listens on; tensor-parallel rank n listens on `kv_port` + n. 0 takes any free ports.
    Tickets carry the ports, so nothing else has to be set."""

    kv_rank: int | None = None
    """Accepted because vLLM's configuration has it, and not used."""

    kv_parallel_size: int = 1
    """Accepted because vLLM's configuration has it, and not used."""

    engine_id: str = msgspec.field(default_factory=lambda: entropy.token_hex(16))
    """Name of this instance among those that exchange KV. Default: random."""

    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """D's answer to a request whose KV cannot be loaded: compute the prompt itself, or return an error."""

    enable_permute_local_kv: bool = False
    """Accepted because vLLM's configuration has it, and not used: layouts are converted where they differ."""

    kv_connector_module_path: str | None = None
    """Python module that holds the `ConnectorSpec` named by `kv_connector`, for connectors of your own."""

    kv_connector_extra_config: dict[str, Any] = {}
    """The connector's own options."""

    @property
    def produces(self) -> bool:
        """True if KV leaves this instance."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def consumes(self) -> bool:
        """True if KV comes to this instance."""
        return self.kv_role in ("kv_consumer", "kv_both")


def parse_transfer_config(text: str) -> KVTransferConfig:
    """Read the JSON of `--kv-transfer-config`. Raises `ConfigError` that names the key and the nearest known one."""
    raw = read_transfer_json(text)
    known_keys = KVTransferConfig.__struct_fields__
    for key in raw:
        if key not in known_keys:
            raise ConfigError(unknown_key(f"--kv-transfer-config: {key}", key, known_keys))
    try:
        config = msgspec.convert(raw, KVTransferConfig, strict=False)
    except msgspec.ValidationError as error:
        for field in msgspec.structs.fields(KVTransferConfig):
            if field.name in raw:  # a message that names the known values
                read_value(f"--kv-transfer-config: {field.name}", raw[field.name], field.type)
        raise ConfigError(f"--kv-transfer-config: {error}") from error
    _require_bounds(config)
    return config


def read_transfer_json(text: str) -> dict[str, Any]:
    """The JSON of `--kv-transfer-config`, whichever program defines its keys. Raises `ConfigError`, also for a key that
    is there twice."""
    try:
        raw = STRICT.decode(text)
        msgspec.json.encode(raw)  # for the program that receives the configuration
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"--kv-transfer-config is not valid JSON: {error}; {_instead(text)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--kv-transfer-config must be a JSON object, got {type(raw).__name__}")
    return _as_vllm_reads_it(raw)


_NUMBERS: dict[str, type] = {"kv_port": int, "kv_rank": int, "kv_parallel_size": int, "kv_buffer_size": float}


def _as_vllm_reads_it(raw: dict[str, Any]) -> dict[str, Any]:
    """vLLM's parser takes numbers as text, and null for what is not set, also for the children of a MultiConnector.
    Raises `ConfigError` for what is no number."""
    read = _with_numbers(raw)
    extra = read.get("kv_connector_extra_config")
    if isinstance(extra, dict) and isinstance(children := extra.get("connectors"), list):
        children_as_read = [_with_numbers(child) if isinstance(child, dict) else child for child in children]
        read["kv_connector_extra_config"] = {**extra, "connectors": children_as_read}
    return read


def _with_numbers(raw: dict[str, Any]) -> dict[str, Any]:
    read = {key: value for key, value in raw.items() if value is not None}
    for key in _NUMBERS.keys() & read.keys():
        try:
            read[key] = msgspec.convert(read[key], _NUMBERS[key], strict=False)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ConfigError(f"--kv-transfer-config: {key} must be a number, got {str(read[key])[:40]!r}") from error
    return read


def names_password(text: str) -> bool:
    """True if a text has a URL with a password in it."""
    return _PASSWORD.search(text) is not None


def _instead(text: str) -> str:
    """A correction of text that is not JSON: for the name of a connector, a configuration with that name."""
    if re.fullmatch(r"[A-Za-z_][\w.:]*", text):
        return f"""write it as '{{"kv_connector": "{text}"}}'"""
    return f"got {text[:200]}"


def _require_bounds(config: KVTransferConfig) -> None:
    if not 0 <= config.kv_port <= 65535:
        raise ConfigError(f"--kv-transfer-config: kv_port must be between 0 and 65535, got {config.kv_port}")
    if not re.fullmatch(r"[^\x00-\x1f]{1,256}", config.engine_id):
        raise ConfigError(
            f"--kv-transfer-config: engine_id must have 1 to 256 characters, and no control characters, got"
            f" {config.engine_id[:64]!r}"
        )
    BUFFER.require("--kv-transfer-config: kv_buffer_size", config.kv_buffer_size)
