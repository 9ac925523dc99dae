"""`[backend.kubernetes]`: the settings of pods, from which `kvferry fleet render` writes manifests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.environment import AUTH_TOKEN
from kvferry.core.settings.flags import variable_name
from kvferry.core.settings.options import read_options, unknown_key
from kvferry.fleet.spec.keys import SECRETS

PodRole = Literal["prefill", "decode", "both", "router", "controller"]
POD_ROLES: tuple[PodRole, ...] = ("prefill", "decode", "both", "router", "controller")

Quantity = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?\Z", description='a quantity such as "500m", "8" or "32Gi"'
    ),
]
ObjectName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z",
        description="the name of an object: lower-case letters, digits, hyphens and dots",
    ),
]

Label = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z",
        description="a name of 63 lower-case letters, digits and hyphens at most",
    ),
]
SecretKey = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[-._a-zA-Z0-9]{1,253}\Z",
        description="the name of a Secret and one of its keys, such as chat-keys/api",
    ),
]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SET_FOR_EACH = (AUTH_TOKEN, "POD_IP")
_KEY_VARIABLES = frozenset(map(variable_name, SECRETS))


class Toleration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A taint of nodes that pods accept, as in a pod's `tolerations`."""

    key: str | None = None
    """Key of the taint. Default: all taints."""
    operator: Literal["Exists", "Equal"] | None = None
    """Comparison with the taint's value. Default: Equal."""
    value: str | None = None
    """Value of the taint, with Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: all effects."""


class PodSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[backend.kubernetes.pod.prefill]`, `….pod.decode`, `….pod.both`, `….pod.router`, `….pod.controller`: the pods of
    one role."""

    requests: dict[str, Quantity] = {}
    """Resources that a pod needs, such as { cpu = "8", memory = "32Gi" }."""
    limits: dict[str, Quantity] = {}
    """Resources that a pod may use; devices too, such as { "nvidia.com/gpu" = "1", "rdma/hca" = "1" }."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that pods may run on."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that pods accept."""
    hosts: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Pods of one instance, among which its ranks are divided; of kvferry's own engine, one for each rank."""
    secrets: dict[str, SecretKey] = {}
    """Environment variables from keys of Secrets, such as { KVFERRY_API_KEY = "chat-keys/api" } of routers: the Secret
    `chat-keys`, and its key `api`."""
    shared_memory: Quantity = "8Gi"
    """Maximum size of /dev/shm, through which the processes of a vLLM server and NCCL exchange data. It counts as
    memory of the pod. KV caches are not in it: only the pod's memory limits them."""


class KubernetesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backend.kubernetes]`."""

    image: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    """Image of all containers, with kvferry in it (`Dockerfile`)."""
    namespace: Label = "default"
    """Namespace of all objects."""
    context: str | None = None
    """Context of the kubeconfig for a controller outside the cluster. Default: the current one; within a pod, its
    service account."""
    pod: dict[PodRole, PodSpec] = {}
    """Resources and nodes, by role."""
    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets of registries."""
    service_account: ObjectName | None = None
    """Account of all pods. They get no token of the Kubernetes API."""
    token_secret: ObjectName | None = None
    """An existing Secret with KVFERRY_AUTH_TOKEN in its key `token`. Default: a Secret is rendered."""
    model_claim: ObjectName | None = None
    """A PersistentVolumeClaim with models and the cache of Hugging Face, mounted at /models. Default: each pod
    downloads the model to its own volume."""
    environment: dict[str, str] = {}
    """Further environment variables of all containers. They are readable in the manifests: put keys into Secrets."""
    routers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Number of routers, each of which has all instances; in replica mode, number of routers of each unit."""
    controllers: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    """Number of controllers of a fleet with `[scale]`; one of them leads, and the others wait."""
    gang: Literal["none", "kubernetes", "volcano"] = "none"
    """PodGroups of pods that are useful only together: of Kubernetes itself (1.37 with the feature gate
    GenericWorkload) or of Volcano."""
    pod_monitor: bool = False
    """Write a PodMonitor for Prometheus' operator."""
    clients_from: dict[str, str] = {}
    """Labels of the pods that may reach the router, beside Prometheus with `pod_monitor`. Default: everyone may."""


def read_kubernetes(table: Mapping[str, Any]) -> KubernetesSpec:
    """The table `[backend.kubernetes]`. Raises `ConfigError` that names the key, and the nearest one that exists."""
    where = "backend.kubernetes"
    pods = table.get("pod", {})
    if not isinstance(pods, dict):
        raise ConfigError(f"{where}.pod must be a table")
    for name, pod_table in pods.items():
        if name not in POD_ROLES:
            raise ConfigError(unknown_key(f"{where}.pod.{name}", name, POD_ROLES))
        if not isinstance(pod_table, dict):
            raise ConfigError(f"{where}.pod.{name} must be a table")
    read = {name: read_options(PodSpec, pod_table, f"{where}.pod.{name}") for name, pod_table in pods.items()}
    spec = read_options(KubernetesSpec, {name: value for name, value in table.items() if name != "pod"}, where)
    for role, pod in read.items():
        for name in pod.secrets:
            _require_variable(f"{where}.pod.{role}.secrets", name)
    for name in spec.environment:
        _require_variable(f"{where}.environment", name)
        if name in _KEY_VARIABLES:
            raise ConfigError(
                f"{where}.environment.{name} could be read in the manifests; put it into a Secret, and name that in"
                f" {where}.pod.ROLE.secrets"
            )
    return msgspec.structs.replace(spec, pod=read)


def _require_variable(where: str, name: str) -> None:
    if name in _SET_FOR_EACH:
        remedy = "put the token into a Secret, and its name into token_secret" if name == AUTH_TOKEN else "leave it out"
        raise ConfigError(f"{where}.{name} is set for each pod by itself; {remedy}")
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is no name of an environment variable")
