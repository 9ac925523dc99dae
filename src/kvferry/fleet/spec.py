"""What a user says about a fleet on one machine. Docstrings of fields are the flags' help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where a process answers HTTP, and how it ends."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""

    port: int = 8000
    """Port to listen on; 0 takes any free one."""

    grace_s: float = 5.0
    """Seconds that running requests have to finish when the process is told to stop."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.grace_s < 0:
            raise ConfigError(f"--grace-s must not be negative, got {self.grace_s}")


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine runs the model."""

    engine: Literal["kvferry", "vllm"] = "kvferry"
    """Engine that runs the model: kvferry's own, or vLLM's servers, which get all arguments after --."""

    engine_python: str | None = None
    """Python of an environment with vLLM, such as /opt/vllm/bin/python. Default: the Python that runs kvferry."""

    engine_argument: tuple[str, ...] = ()
    """One argument for vLLM; repeat it for more. `-- --dtype float32` is a shorter way to say the same."""

    def __post_init__(self) -> None:
        if self.engine != "vllm" and (self.engine_python is not None or self.engine_argument):
            raise ConfigError(
                "--engine-python and the arguments after -- are for vLLM; add --engine vllm, or leave them out"
            )


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """What an instance is told beside its engine's settings."""

    served_model_name: tuple[str, ...] = ()
    """Name of the model in the API; repeat it for more. Default: the model's own name."""

    kv_transfer_config: str | None = None
    """How KV moves: vLLM's JSON, such as {"kv_connector":"SharedStorageConnector"}. Default for prefill and decode
    instances: {"kv_connector":"P2pConnector"}, each with its own kv_role. With --engine vllm, any connector that vLLM
    knows can be used, such as {"kv_connector":"NixlConnector"}."""

    register: tuple[str, ...] = ()
    """URL of a router (started with --registration) to register at; repeat it, or separate several by commas. The
    instance says again and again that it is there, and takes its leave when it is told to end. Needs the routers'
    KVFERRY_AUTH_TOKEN. An instance that does both phases registers for decode."""

    advertise_url: str | None = None
    """URL at which those routers reach the instance. Default: where it listens; if that is all of the machine's
    addresses, the one that leads to the router."""

    register_ca: Path | None = None
    """Certificate authority (PEM) of routers at https:// URLs. Default: the system's authorities."""


@dataclass(frozen=True, kw_only=True)
class FleetSpec:
    """How many instances of which role run on this machine."""

    prefill: int = 0
    """Number of prefill instances. With neither prefill nor decode instances, one instance does both phases."""

    decode: int = 0
    """Number of decode instances. If only one of --prefill and --decode is given, the other is 1."""

    cores: str | None = None
    """CPU cores to use, such as 0-3,8; they are divided among the instances. Default: all cores that this process may
    use."""

    instance_ports: int | None = None
    """Port of the first instance's own endpoint, for scraping its /metrics. Prefill instances come first, then decode
    instances, each on the next port. Default: any free ports; the addresses are printed at start."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} must not be negative, got {getattr(self, name)}")
        if self.instance_ports is not None:
            last = self.instance_ports + self.num_prefill + self.num_decode - 1
            if not (self.instance_ports > 0 and last <= 65535):
                raise ConfigError(f"--instance-ports must be between 1 and 65535 for all, got {self.instance_ports}")

    def instance_port(self, index: int) -> int:
        """The port of the `index`-th instance; 0 for any free one."""
        return 0 if self.instance_ports is None else self.instance_ports + index

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode are on different instances."""
        return bool(self.prefill or self.decode)

    @property
    def num_prefill(self) -> int:
        """Prefill instances to start."""
        return max(self.prefill, 1) if self.is_split else 0

    @property
    def num_decode(self) -> int:
        """Decode instances to start."""
        return max(self.decode, 1) if self.is_split else 0
