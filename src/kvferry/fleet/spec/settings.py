"""The settings of a fleet on one machine. Docstrings of fields are the flags' help."""

from __future__ import annotations

from typing import Annotated, Literal

from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import CountOrZero, Port, PortOrAny, SecondsOrZero
from kvferry.core.settings.model import COMMON, Settings


class ListenSettings(Settings, frozen=True, kw_only=True):
    """Where a process answers HTTP, and how it stops."""

    host: Annotated[str, COMMON] = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""

    port: Annotated[PortOrAny, COMMON] = 8000
    """Port to listen on; 0 takes any free one."""

    grace_s: SecondsOrZero = 30.0
    """Seconds that running requests have to finish when the process is stopped (SIGTERM, Ctrl-C); a second Ctrl-C ends
    them at once. A deployment of several processes ends in stages (router, instances), each of which has this time."""


class EngineChoice(Settings, frozen=True, kw_only=True):
    """The engine that runs the model."""

    engine: Annotated[Literal["kvferry", "vllm", "sglang"], COMMON] = "kvferry"
    """Engine that runs the model: kvferry's own, or the servers of vLLM or SGLang, which get all arguments after --."""

    engine_python: str | None = None
    """Python of an environment with vLLM or SGLang, such as /opt/vllm/bin/python. Default: the Python that runs
    kvferry."""

    engine_argument: tuple[str, ...] = ()
    """One argument for vLLM or SGLang; repeat it for more. `-- --dtype float32` is a shorter form."""

    def __post_init__(self) -> None:
        if self.engine == "kvferry" and (self.engine_python is not None or self.engine_argument):
            raise ConfigError(
                "--engine-python and the arguments after -- are for vLLM and SGLang; add --engine vllm or --engine"
                " sglang, or leave them out"
            )


class InstanceSettings(Settings, frozen=True, kw_only=True):
    """Settings of an instance that are not its engine's."""

    served_model_name: tuple[str, ...] = ()
    """Name of the model in the API; repeat it for more. Default: the model's own name."""

    kv_transfer_config: Annotated[str | None, COMMON] = None
    """How KV moves: vLLM's JSON, such as {"kv_connector":"SharedStorageConnector"}. Default for prefill and decode
    instances: {"kv_connector":"P2pConnector"}, each with its own kv_role. With --engine vllm, any connector that vLLM
    knows can be used, such as {"kv_connector":"NixlConnector"}."""

    register: tuple[str, ...] = ()
    """URL of a router (started with --registration) to register at; repeat it, or separate several by commas. The
    instance renews its registration until it is stopped, and then deregisters. Needs the same KVFERRY_AUTH_TOKEN as the
    routers. An instance that does both phases registers for decode. dynamo://NAMESPACE/COMPONENT: serve the engine as a
    worker of Dynamo's too, for Dynamo's own frontend."""

    advertise_url: str | None = None
    """URL at which those routers reach the instance. Default: the address that it listens on; if it listens on all
    addresses of the machine, the one that is used to reach the router."""


_MAX_INSTANCES = 256
"""More instances would bring the machine down."""


class FleetShapeSettings(Settings, frozen=True, kw_only=True):
    """Number of instances of each role, and where they run."""

    prefill: Annotated[CountOrZero | None, COMMON] = None
    """Number of prefill instances. With neither --prefill nor --decode, one of each where there are two GPUs, or two
    cores and no GPU, else one instance that does both phases; 0: one instance that does both."""

    decode: Annotated[CountOrZero | None, COMMON] = None
    """Number of decode instances. If only one of --prefill and --decode is given, and not 0, the other is 1."""

    cores: Annotated[str | None, COMMON] = None
    """CPU cores to use, such as 0-3,8; they are divided among the instances. Default: all cores that this process may
    use."""

    instance_ports: Port | None = None
    """Port of the first instance's own endpoint, for scraping its /metrics. Prefill instances come first, then decode
    instances, each on the next port. Default: any free ports; the addresses are printed at start."""

    backend: Literal["local", "ray"] = "local"
    """Where the instances and the router are: processes of this machine, or actors of a Ray cluster that this machine
    is in."""

    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379. Default: RAY_ADDRESS, or the cluster that this machine is
    in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address and self.backend != "ray":
            raise ConfigError("--address is for --backend ray")
        if self.is_split and 0 in (self.prefill, self.decode):
            none, other = ("--prefill", "--decode") if self.prefill == 0 else ("--decode", "--prefill")
            raise ConfigError(
                f"{none} 0 with {other} {self.decode if self.prefill == 0 else self.prefill}: a fleet has at least one"
                f" instance of each role; leave out {other} for one instance that does both phases, or {none} for one"
                " instance of that role"
            )
        if self.num_prefill + self.num_decode > _MAX_INSTANCES:
            raise ConfigError(
                f"--prefill and --decode ask for {self.num_prefill + self.num_decode} instances on this machine; at"
                f" most {_MAX_INSTANCES} are started"
            )
        if self.instance_ports is not None:
            last = self.instance_ports + self.num_prefill + self.num_decode - 1
            if last > 65535:
                raise ConfigError(
                    f"--instance-ports {self.instance_ports}: the last instance's port would be {last}, more than 65535"
                )

    def instance_port(self, index: int) -> int:
        """The port of instance `index`; 0 for any free one."""
        return 0 if self.instance_ports is None else self.instance_ports + index

    @property
    def is_split(self) -> bool:
        """True if prefill and decode are on different instances."""
        return bool(self.prefill or self.decode)

    @property
    def num_prefill(self) -> int:
        """Number of prefill instances to start."""
        return (self.prefill or 1) if self.is_split else 0

    @property
    def num_decode(self) -> int:
        """Number of decode instances to start."""
        return (self.decode or 1) if self.is_split else 0
