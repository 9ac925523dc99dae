"""The desired state of a fleet: one frozen value, read from TOML.

    name = "chat"; model = "Qwen/Qwen3-8B"; mode = "pooling"

Every table and key is a field below. `DesiredFleet.revision` names what cannot be changed in a running instance: a
fleet with another one is *rolled*, one with other numbers is *scaled*.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint
from kvferry.core.settings.flags import flag_of
from kvferry.core.settings.options import read_options, read_value, unknown_key
from kvferry.core.settings.toml_file import read_toml
from kvferry.core.settings.transfer_config import names_password
from kvferry.fleet.spec.arguments import VLLM_KEY_VARIABLE, own_key_flag, vllm_key_flag
from kvferry.fleet.spec.keys import (
    ENGINE_KEYS,
    FLEET_KEYS,
    ROLE_KEYS,
    ROUTER_KEYS,
    SECRETS,
    KeyTable,
    TypedKeys,
    read_keys,
)
from kvferry.fleet.spec.kubernetes_spec import KubernetesSpec, read_kubernetes
from kvferry.fleet.spec.ray_spec import ActorRole, ActorSpec, read_ray

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = get_args(Role)

Table = TypeVar("Table", bound=msgspec.Struct)

MemberRole = Literal["prefill", "decode", "both", "router"]
"""The role of a process of the fleet."""

BACKENDS = ExtensionPoint(
    "backend.kind",
    {
        "local": "kvferry.fleet.backends.local.backend:LocalBackend",
        "ray": "kvferry.fleet.backends.ray.backend:RayBackend",
    },
    "kvferry.backends",
)
"""The kinds of backends. A backend in another package is an entry point of the group, or `package.module:Class`."""

KUBERNETES = "kubernetes"
"""The `kind` of a fleet whose members Kubernetes starts, from rendered manifests."""

SGLANG_BACKENDS = ("mooncake", "mooncake_tcp", "nixl")
"""How SGLang's servers may move KV; the first is the default."""

MOST = 4096
"""Instances of one role, or units."""

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")

Number = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Duration = Annotated[
    str, msgspec.Meta(pattern=rf"^{_DURATION.pattern}\Z", description='a duration such as "90s", "2m" or "500ms"')
]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z",
        description="lower-case letters, digits and hyphens, 40 at most",
    ),
]


def seconds(duration: str) -> float:
    """A `Duration` in seconds."""
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ConfigError(f"{duration!r} is not a duration such as '90s', '2m' or '500ms'")
    return float(match[1]) * _UNITS[match[2]]


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[engine]`: what runs the model, on every instance."""

    kind: Literal["kvferry", "vllm", "sglang", "dynamo"] = "kvferry"
    """kvferry's own engine, vLLM's servers, SGLang's, or Dynamo's vLLM workers."""
    connector: tuple[str, ...] = ()
    """Connectors, by the names that --kv-transfer-config takes; several become a MultiConnector, asked in this order.
    Default: P2pConnector. With SGLang, its transfer backend: mooncake (the default), mooncake_tcp (without
    RDMA) or nixl."""
    kv_transfer_config: str = ""
    """The whole JSON of --kv-transfer-config, instead of `connector`; each instance gets the kv_role of its role."""
    args: tuple[str, ...] = ()
    """Further flags of every instance: those of `kvferry decode`, `vllm serve`, `sglang.launch_server` or
    `dynamo.vllm`."""
    python: str = ""
    """Python of an environment with vLLM, SGLang or Dynamo; default: the Python that runs kvferry."""

    @property
    def connectors(self) -> tuple[str, ...]:
        """The connectors that are used where `kv_transfer_config` is not given."""
        return self.connector or ("P2pConnector",)


class RoleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[role.prefill]`, `[role.decode]`, `[role.both]`: how many instances do this, in pooling mode."""

    count: Number = 1
    """Desired number of instances, which `kvferry fleet scale` changes."""
    min: Number = 0
    """Minimum number of instances, also of serving ones during a roll."""
    max: Number | None = None
    """No more are ever there, those that a roll starts in advance included. Default: `count`, and those."""
    tensor_parallel_size: Positive = 1
    """Ranks of one instance."""
    can_be: tuple[Role, ...] = ()
    """Roles that an instance of this one may change to without a restart."""
    args: tuple[str, ...] = ()
    """Further flags of instances of this role."""


class RouterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[router]`: the fleet's one endpoint."""

    count: Number | None = None
    """Number of router processes that share the address. Default: two if there are cores for them, otherwise one; 0:
    none."""
    host: str = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes any free one."""
    args: tuple[str, ...] = ()
    """Further flags of `kvferry router`."""


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[unit]`, in replica mode: a group of members that is started, scaled and rolled as one. Hand-offs stay within a
    unit."""

    members: dict[Role, Positive]
    """Instances of each role in one unit, such as { prefill = 1, decode = 2 }."""
    count: Number = 1
    """Desired number of units."""
    max: Number | None = None
    """No more are ever there, those that a roll starts in advance included. Default: `count`, and those."""
    place: Literal["same-host", "pack", "spread"] = "same-host"
    """Placement of the members of one unit."""


class RollSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[roll]`: how instances of an old revision are replaced."""

    surge: Number = 1
    """Maximum number of instances of a role (units, in replica mode) beyond its count at a time."""
    unavailable: Number = 0
    """Maximum number of instances of a role that may be missing from its count during a roll."""
    max_skew: Positive = 1
    """Maximum number of instances by which one role may be ahead of another, in proportion to their counts."""
    pause: bool = False
    """Start and replace nothing while this is set."""
    history: Positive = 10
    """Number of earlier revisions to which one can roll back."""


class FailureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[failure]`: what happens to instances that end, hang or never serve."""

    restart: Literal["instance", "unit"] = "instance"
    """What is replaced if an instance of a unit fails: only the instance, or the whole unit."""
    backoff: tuple[Duration, Duration] = ("1s", "60s")
    """The wait before the next start after failures in a row: the first wait, which doubles each time, and the
    maximum."""
    crash_loop: Positive = 5
    """Number of failures in a row after which nothing of that revision and role is started, and `status` says why."""
    hang: Duration = "60s"
    """Time without an answer to GET /health after which an instance or a router is replaced; "0s": never."""
    start: Duration = "10m"
    """Maximum time until an instance serves; in replica mode, until all of a unit serve."""
    drain: Duration = "120s"
    """Maximum time until the requests and tickets of a draining instance have ended; then it is stopped."""


class ScaleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[scale]`: the counts follow the traffic. The roles' `min` and `max` limit them; `count` is the number at the
    start."""

    ttft: Duration
    """Target of the time to the first token."""
    itl: Duration
    """Target of the mean time between two tokens of an answer."""
    attainment: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.99
    """The share of requests that should be within both targets."""
    budget: Number | None = None
    """Maximum number of ranks of all instances together. Default: the number that the roles' `max` allow."""
    fewest_per_decode: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Minimum number of prefill instances for each decode instance."""
    most_per_decode: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Maximum number of prefill instances for each decode instance. Default: no maximum."""
    aggregate: bool = False
    """There may be no prefill instance, so that decode instances compute all prompts; `min` of prefill must be 0."""
    interval: Duration = "5s"
    """Time between two decisions."""
    cool_down: Duration = "2m"
    """Time after a change in which no instance is released."""
    hold: Duration = "15m"
    """Time for which requests count for the instances that are kept: instances for a burst are released when the burst
    is older, or is only a few of the requests since then."""
    idle: Duration = "0s"
    """Time without requests after which all instances of all roles are stopped; the next request starts them again.
    Every `min` must be 0. "0s": never."""
    starts: Duration = "30s"
    """Start time of an instance that is assumed until it was measured."""
    warm: Duration = "10s"
    """Time after its start in which the measurements of an instance do not count."""
    least_requests: Positive = 20
    """Number of measured requests from which on decisions are made."""
    recommend: bool = False
    """Only record the decisions, without carrying them out."""


class Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[backend]`: where the instances run."""

    kind: str = "local"
    """`local`: processes of this machine; `ray`: actors of a Ray cluster; `kubernetes`: pods, which Kubernetes starts
    from the manifests that `kvferry fleet render` writes; or a backend of your own, by its entry point or
    as `package.module:Class`."""
    address: str = ""
    """Address of the Ray cluster, such as 10.0.0.1:6379. Default: RAY_ADDRESS, or the cluster that this machine is
    in."""
    options: dict[str, Any] = {}
    """`[backend.options]`: options of a backend of another package."""
    kubernetes: KubernetesSpec | None = None
    """Settings of pods."""
    ray: dict[ActorRole, ActorSpec] = {}
    """Resources that members on Ray need of their nodes, by role."""

    def fixed(self, roles: Collection[MemberRole]) -> list[Any]:
        """Settings that cannot be changed in running members of these roles."""
        actors = {role: actor for role, actor in sorted(self.ray.items()) if role in roles}
        return [actor for actor in (actors, self.options) if actor]


class DesiredFleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet. Read it with `read_fleet`, which checks it."""

    name: Name
    """Name of the fleet, by which commands find it."""
    model: str
    """A local directory, a Hugging Face id, or kvferry/tiny-python."""
    mode: Literal["pooling", "replica"]
    """`pooling`: each role is scaled separately, and any P hands off to any D. `replica`: units of fixed members."""
    engine: EngineSpec = EngineSpec()
    args: tuple[str, ...] = ()
    """Flags of `kvferry serve` for all processes of the fleet, such as --log-format=json."""
    role: dict[MemberRole, RoleSpec] = {}
    router: RouterSpec = RouterSpec()
    unit: Unit | None = None
    roll: RollSpec = RollSpec()
    failure: FailureSpec = FailureSpec()
    backend: Backend = Backend()
    scale: ScaleSpec | None = None
    keys: TypedKeys = TypedKeys()
    """The keys of kvferry's own settings, from any table."""
    stamp: str = ""
    """A text that is part of the revision: `kvferry fleet roll` changes it, to replace all members by new ones with the
    same settings."""

    @property
    def revision(self) -> str:
        """Names the settings of the instances: eight hexadecimal digits, the same for the same settings."""
        fixed = {
            name: (role.tensor_parallel_size, role.args, bool(role.can_be)) for name, role in sorted(self.role.items())
        }
        members = None if self.unit is None else dict(sorted(self.unit.members.items()))
        parts = [self.model, self.mode, self.engine, self.args, fixed, members, self.stamp]
        if self.keys.fleet or self.keys.engine or any(self.keys.role.values()):
            parts.append((self.keys.fleet, self.keys.engine, self.keys.role))
        parts += self.backend.fixed(set(self.role) if self.unit is None else set(self.unit.members))
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:8]

    @property
    def itl_target_s(self) -> float | None:
        """Target of the time between two tokens, by which kvferry's engines limit their steps; None: there is none."""
        return None if self.scale is None else seconds(self.scale.itl)

    @property
    def num_instances(self) -> int:
        """Desired number of instances of all roles."""
        if self.unit is not None:
            return self.unit.count * sum(self.unit.members.values())
        return sum(role.count for role in self.role.values())

    def front(self, num_routers: int) -> DesiredFleet:
        """The routers as a separate fleet, which the same loop manages, so that a change of the instances rolls no
        router, and the other way round. `num_routers`: number of routers if `[router]` does not set it."""
        router = self.router
        number = num_routers if router.count is None else router.count
        arguments = (f"--host={router.host}", f"--port={router.port}", *router.args, *self.args)
        keys = {**self.keys.fleet, **self.keys.router}
        return DesiredFleet(
            name=self.name,
            model=self.name,
            mode="pooling",
            role={"router": RoleSpec(count=number, args=arguments)},
            roll=self.roll,
            failure=self.failure,
            backend=self.backend,
            keys=TypedKeys(role={"router": keys} if keys else {}),
            stamp=self.stamp,
        )


def read_fleet(path: Path) -> DesiredFleet:
    """The fleet in a TOML file. Raises `ConfigError`: one line with the file, the key and what is wrong with it."""
    tables = read_toml(path)
    try:
        fleet = fleet_from(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    _warn_of_arguments(path, fleet)
    return fleet


def _warn_of_arguments(path: Path, fleet: DesiredFleet) -> None:
    """Warn of flags of kvferry's own processes in `args`, which are still read."""
    arguments_by_table = {"router": fleet.router.args, "": fleet.args}
    if fleet.engine.kind == "kvferry":
        arguments_by_table |= {
            "engine": fleet.engine.args,
            **{f"role.{name}": role.args for name, role in fleet.role.items()},
        }
    for where, arguments in arguments_by_table.items():
        if arguments:
            table = f"[{where}]" if where else "the spec"
            logger.warning(
                "%s: args of %s are flags of kvferry's own processes, which is deprecated; write them as keys, such as"
                " %s = ...",
                path,
                table,
                flag_of(arguments[0]).removeprefix("--").replace("-", "_"),
            )


_TABLES: dict[str, type[msgspec.Struct]] = {
    "engine": EngineSpec,
    "router": RouterSpec,
    "unit": Unit,
    "roll": RollSpec,
    "failure": FailureSpec,
    "scale": ScaleSpec,
}


def fleet_from(tables: Mapping[str, Any]) -> DesiredFleet:
    """The fleet of these tables. Raises `ConfigError` that names the key, and the nearest one that exists."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(DesiredFleet) if field.name != "keys"}
    keys = _keys(tables)
    values: dict[str, Any] = {"keys": keys}
    for key, value in tables.items():
        if key in keys.fleet:
            continue
        if key not in fields:
            raise ConfigError(unknown_key(key, key, [*fields, *FLEET_KEYS.fields()]))
        if key == "role":
            values[key] = {
                _role(name): _read(RoleSpec, f"role.{name}", _table(f"role.{name}", table), ROLE_KEYS)
                for name, table in _table("role", value).items()
            }
        elif key in ("engine", "router"):
            values[key] = _read(_TABLES[key], key, _table(key, value), ENGINE_KEYS if key == "engine" else ROUTER_KEYS)
        elif key == "backend":
            values[key] = _backend(_table(key, value))
        elif key in _TABLES:
            values[key] = read_options(_TABLES[key], _table(key, value), key)
        else:
            values[key] = read_value(key, value, fields[key].type)
    for key in ("name", "model", "mode"):
        if key not in values:
            raise ConfigError(f"{key} is required")
    fleet = check_fleet(DesiredFleet(**values))
    _require_no_keys(fleet)
    return fleet


def _keys(spec: Mapping[str, Any]) -> TypedKeys:
    """The keys of kvferry's own settings in a spec's tables. Raises `ConfigError`."""
    roles = _table("role", spec.get("role", {}))
    tables = {key: _table(key, spec.get(key, {})) for key in ("engine", "router")}
    keys = TypedKeys(
        fleet=read_keys("", spec, FLEET_KEYS),
        engine=read_keys("engine", tables["engine"], ENGINE_KEYS),
        router=read_keys("router", tables["router"], ROUTER_KEYS),
        role={
            role: values
            for role, table in roles.items()
            if (values := read_keys(f"role.{role}", _table(f"role.{role}", table), ROLE_KEYS))
        },
    )
    kind = tables["engine"].get("kind", "kvferry")
    if kind != "kvferry":
        engine_tables = {"engine": keys.engine, **{f"role.{role}": values for role, values in keys.role.items()}}
        for where, values in engine_tables.items():
            for name in values:
                raise ConfigError(f"{where}.{name} is of kvferry's own engine; flags of {kind} go into {where}.args")
    return keys


def _read(kind: type[Table], where: str, table: Mapping[str, Any], keys: KeyTable) -> Table:
    """A table without the keys of kvferry's own settings. Raises `ConfigError` that names the key."""
    settings = keys.fields()
    for key in table:
        if key in SECRETS:
            raise ConfigError(
                f"{where}.{key} is a secret, and a spec is none: name a file in {key}_file, or in Kubernetes a Secret"
                " in backend.kubernetes.pod.ROLE.secrets"
            )
        if key not in settings and key not in kind.__struct_fields__:
            raise ConfigError(unknown_key(f"{where}.{key}", key, [*kind.__struct_fields__, *settings]))
    return read_options(kind, {key: value for key, value in table.items() if key not in settings}, where)


def _require_no_keys(fleet: DesiredFleet) -> None:
    """Raise `ConfigError` for an API key in a spec: a spec is not secret, and in Kubernetes it is a ConfigMap."""
    engine_tables = {
        "engine.args": fleet.engine.args,
        **{f"role.{name}.args": role.args for name, role in fleet.role.items()},
    }
    tables = {"args": fleet.args, "router.args": fleet.router.args}
    for where, arguments in (tables | engine_tables).items():
        is_vllms = fleet.engine.kind in ("vllm", "dynamo") and where in engine_tables
        for flag in filter(None, map(vllm_key_flag if is_vllms else own_key_flag, arguments)):
            instead = f"name a file with {flag}-file"
            if is_vllms:
                instead = f"set {VLLM_KEY_VARIABLE} in the environment of the command that starts the fleet"
            raise ConfigError(
                f"{where}: {flag} is a secret, and a spec is none: {instead}, or in Kubernetes a"
                " Secret in backend.kubernetes.pod.ROLE.secrets"
            )
    all_texts = {"engine.kv_transfer_config": (fleet.engine.kv_transfer_config,), **tables, **engine_tables}
    for where, values in fleet.keys.tables().items():
        all_texts[where or "the spec"] = tuple(value for value in values.values() if isinstance(value, str))
    for where, texts in all_texts.items():
        if any(map(names_password, texts)):
            raise ConfigError(
                f"{where}: a URL has a password, and a spec is no secret: put it into a file, and name that with"
                " password_file (valkey://HOST:PORT?password_file=PATH)"
            )


def _table(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table")
    return value


def _backend(table: Mapping[str, Any]) -> Backend:
    pods, actors = table.get("kubernetes"), table.get("ray")
    backend = read_options(
        Backend, {key: value for key, value in table.items() if key not in ("kubernetes", "ray")}, "backend"
    )
    BACKENDS.require_known(backend.kind, KUBERNETES)
    if backend.options and backend.kind in BACKENDS.table:
        raise ConfigError(f"backend.options are for backends of other packages, not for {backend.kind}")
    if (backend.kind == "kubernetes") != (pods is not None):
        raise ConfigError('[backend.kubernetes] and kind = "kubernetes" need each other')
    if backend.kind != "ray" and (backend.address or actors is not None):
        raise ConfigError(
            f'backend.{"address" if backend.address else "ray"} is for kind = "ray", not for {backend.kind}'
        )
    if actors is not None:
        return msgspec.structs.replace(backend, ray=read_ray(_table("backend.ray", actors)))
    if pods is not None:
        return msgspec.structs.replace(backend, kubernetes=read_kubernetes(_table("backend.kubernetes", pods)))
    return backend


def _role(name: str) -> Role:
    if name not in ROLES:
        raise ConfigError(unknown_key(f"role.{name}", name, ROLES))
    return name


def check_fleet(fleet: DesiredFleet) -> DesiredFleet:
    """The fleet. Raises `ConfigError` for tables that contradict each other."""
    if fleet.mode == "replica":
        if fleet.unit is None:
            raise ConfigError('mode = "replica" needs a table [unit] with its members')
        if not fleet.unit.members:
            raise ConfigError("unit.members names no role")
        if (num := fleet.unit.count * sum(fleet.unit.members.values())) > MOST:
            raise ConfigError(f"unit: {fleet.unit.count} units are {num} instances, and a fleet has at most {MOST}")
    elif fleet.unit is not None:
        raise ConfigError('[unit] is for mode = "replica"; in pooling mode, roles have counts')
    elif not fleet.role:
        raise ConfigError("there is no role; add [role.prefill] and [role.decode], or [role.both]")
    roles = set(fleet.role) if fleet.unit is None else set(fleet.unit.members)
    if len(roles & {"prefill", "decode"}) == 1 and "both" not in roles:
        alone, other = ("prefill", "decode") if "prefill" in roles else ("decode", "prefill")
        raise ConfigError(f"there are {alone} instances, and none for {other}")
    for name, role in fleet.role.items():
        if role.max is not None and not role.min <= role.count <= role.max:
            raise ConfigError(f"role.{name}: count = {role.count} is not between min = {role.min} and max = {role.max}")
        if role.count < role.min:
            raise ConfigError(f"role.{name}: count = {role.count} is less than min = {role.min}")
        if not _has_room(fleet.roll, role) and role.min > max(0, role.count - fleet.roll.unavailable):
            raise ConfigError(
                f"role.{name}: with min = {role.min} and no room for roll.surge, nothing could ever be replaced"
            )
        if name in role.can_be:
            raise ConfigError(f"role.{name}.can_be names the role itself")
    if fleet.unit is not None and fleet.unit.max is not None and fleet.unit.count > fleet.unit.max:
        raise ConfigError(f"unit: count = {fleet.unit.count} is more than max = {fleet.unit.max}")
    if fleet.scale is not None:
        _check_scale(fleet, fleet.scale)
    if fleet.engine.connector and fleet.engine.kv_transfer_config:
        raise ConfigError("engine: connector and kv_transfer_config say the same; leave one of them out")
    if fleet.engine.kind == "sglang":
        _check_sglang(fleet)
    if fleet.engine.kind == "dynamo":
        _check_dynamo(fleet)
    if not fleet.roll.surge and not fleet.roll.unavailable:
        raise ConfigError("roll: with surge = 0 and unavailable = 0 nothing could ever be replaced")
    first, longest = map(seconds, fleet.failure.backoff)
    if first > longest:
        raise ConfigError("failure.backoff: the first wait is longer than the longest")
    if not seconds(fleet.failure.start):
        raise ConfigError("failure.start must be more than 0: nothing could ever serve")
    return fleet


def check_sglang_transfer(engine: EngineSpec) -> None:
    """Raise `ConfigError` for a connector that SGLang does not have."""
    if engine.kv_transfer_config or len(engine.connector) > 1 or not set(engine.connector) <= set(SGLANG_BACKENDS):
        raise ConfigError(
            f"engine: SGLang moves KV by {', '.join(SGLANG_BACKENDS[:-1])} or {SGLANG_BACKENDS[-1]}; name one of them"
            " in connector, or in its own flag --disaggregation-transfer-backend, instead of a kv-transfer-config"
        )


def _check_sglang(fleet: DesiredFleet) -> None:
    check_sglang_transfer(fleet.engine)
    for name, role in fleet.role.items():
        if "both" in (name, *role.can_be) and role.can_be:
            raise ConfigError(f"role.{name}.can_be: SGLang's servers change between prefill and decode only")
    if fleet.scale is not None and fleet.scale.aggregate:
        raise ConfigError("scale: SGLang's decode servers compute no prompts; leave out aggregate")
    if fleet.backend.kind == "kubernetes":
        raise ConfigError('engine.kind = "sglang" is for processes and Ray; no pods are written for it')


def _check_dynamo(fleet: DesiredFleet) -> None:
    for name, role in fleet.role.items():
        if role.can_be:
            raise ConfigError(f"role.{name}.can_be: a worker of Dynamo's has the role that it was started for")
    if fleet.backend.kind == "kubernetes":
        raise ConfigError(
            'engine.kind = "dynamo" is for processes and Ray, and no pods are written for it; a router takes workers'
            " that Dynamo's operator has started: --decode-url dynamo://NAMESPACE/COMPONENT"
        )


def unrollable_part(fleet: DesiredFleet) -> str:
    """Name of a role, or "unit", of which no roll could replace anything; empty if there is none."""
    if fleet.roll.unavailable:
        return ""
    kinds: dict[str, RoleSpec | Unit] = (
        {"unit": fleet.unit} if fleet.unit is not None else {f"role.{name}": part for name, part in fleet.role.items()}
    )
    return next((kind for kind, part in kinds.items() if part.count and not _has_room(fleet.roll, part)), "")


def _has_room(roll: RollSpec, of: RoleSpec | Unit) -> bool:
    """True if a roll may start any in advance."""
    return bool(roll.surge) and (of.max is None or of.max > of.count)


def _check_scale(fleet: DesiredFleet, scale: ScaleSpec) -> None:
    roles = set(fleet.role) if fleet.unit is None else set(fleet.unit.members)
    if roles not in ({"prefill", "decode"}, {"both"}):
        raise ConfigError(f"scale: the roles are prefill and decode, or both alone, not {', '.join(sorted(roles))}")
    if scale.budget is None:
        unbounded = [f"role.{name}" for name, role in fleet.role.items() if role.max is None]
        if fleet.unit is not None and fleet.unit.max is None:
            unbounded = ["unit"]
        if unbounded:
            raise ConfigError(f"scale: {unbounded[0]} needs max, or [scale] a budget: nothing bounds it")
    if seconds(scale.ttft) <= 0 or seconds(scale.itl) <= 0 or seconds(scale.interval) <= 0:
        raise ConfigError("scale: ttft, itl and interval must be more than 0")
    if scale.most_per_decode is not None and scale.fewest_per_decode > scale.most_per_decode:
        raise ConfigError("scale: fewest_per_decode is more than most_per_decode")
    with_minimum = [name for name, role in fleet.role.items() if role.min]
    if seconds(scale.idle) and with_minimum:
        raise ConfigError(
            f"scale.idle stops all instances, and role.{with_minimum[0]} keeps min = {fleet.role[with_minimum[0]].min}"
        )
    if not fleet.router.count and fleet.router.count is not None:
        raise ConfigError("scale: what is asked for is measured by routers; router.count = 0 has none")
    if not _is_possible(fleet, scale):
        raise ConfigError(
            "scale: no number of instances is allowed: min, max, budget and the bounds of the ratio contradict each"
            " other"
        )


def _is_possible(fleet: DesiredFleet, scale: ScaleSpec) -> bool:
    """True if any fleet that serves is within all bounds."""
    budget = math.inf if scale.budget is None else scale.budget
    most_per_decode = math.inf if scale.most_per_decode is None else scale.most_per_decode
    if fleet.unit is not None:
        p = fleet.unit.members.get("prefill", 0)
        d = sum(fleet.unit.members.values()) - p
        return p + d <= budget and (not p or scale.fewest_per_decode <= p / d <= most_per_decode)
    prefill = fleet.role.get("prefill", RoleSpec(count=0, max=0))
    answering = fleet.role["both" if "both" in fleet.role else "decode"]
    may_miss = not prefill.min and (scale.aggregate or "both" in fleet.role)
    max_counts = [
        budget // role.tensor_parallel_size if role.max is None else role.max for role in (prefill, answering)
    ]
    for d in range(max(1, answering.min), int(max_counts[1]) + 1):
        p = 0 if may_miss else max(1, prefill.min, math.ceil(scale.fewest_per_decode * d - 1e-9))
        price = p * prefill.tensor_parallel_size + d * answering.tensor_parallel_size
        if p <= max_counts[0] and p <= most_per_decode * d and price <= budget:
            return True
    return False
