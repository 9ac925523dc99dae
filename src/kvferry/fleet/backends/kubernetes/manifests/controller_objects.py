"""The controller of a fleet with `[scale]` as objects of Kubernetes: it sets the replicas of the fleet's workloads.

It reads its spec from a ConfigMap. Its account may only scale the workloads of its own fleet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.core.settings.toml_file import to_toml
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import (
    SPEC_FILE,
    Object,
    PodTemplates,
    kubernetes_of,
    labels_of,
    pod_of,
)
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole
from kvferry.fleet.spec.spec_file import to_table

LWS = "leaderworkerset.x-k8s.io/v1"


def controller_name(fleet: DesiredFleet) -> str:
    """The name of all objects of a fleet's controller."""
    return f"{fleet.name}-controller"


def spec_text(fleet: DesiredFleet, values: Values) -> str:
    """The spec as a file for a controller in the cluster."""
    table = to_table(fleet)
    kubernetes = table["backend"]["kubernetes"]
    kubernetes.pop("context", None)  # within the cluster, the pod's account is used
    kubernetes["image"] = values.value("image", kubernetes_of(fleet).image)
    kubernetes["namespace"] = values.namespace(kubernetes_of(fleet).namespace)
    for role, spec in fleet.role.items():
        keys = table["role"][role]
        bounds = {key: values.value(f"autoscaling.{role}.{key}", keys[key]) for key in ("min", "max") if key in keys}
        table["role"][role] = {**keys, "count": values.value(f"replicas.{role}", spec.count), **bounds}
    return values.within(to_toml(table))


def workload_of(fleet: DesiredFleet, role: MemberRole) -> tuple[str, str, str]:
    """API version, kind and name of the object whose replicas are the instances of a role."""
    version, kind = (LWS, "LeaderWorkerSet") if pod_of(fleet, role).hosts > 1 else ("apps/v1", "Deployment")
    return version, kind, f"{fleet.name}-{role}"


def rules(fleet: DesiredFleet) -> list[dict[str, Any]]:
    """The permissions of the controller's account: it scales the fleet's workloads, and holds the Lease."""
    workloads = [workload_of(fleet, role) for role in fleet.role]
    return [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [controller_name(fleet)],
            "verbs": ["get", "patch"],
        },
        *(
            {
                "apiGroups": [version.partition("/")[0]],
                "resources": [f"{kind.lower()}s/scale"],
                "resourceNames": [name],
                "verbs": ["patch"],
            }
            for version, kind, name in workloads
        ),
    ]


def controller_objects(
    fleet: DesiredFleet, values: Values, routers: Sequence[str]
) -> Iterator[tuple[str, str, str, Object]]:
    """Version, kind, name and content of the controller's objects. `routers`: their URLs."""
    assert fleet.scale is not None
    name = controller_name(fleet)
    namespace = values.namespace(kubernetes_of(fleet).namespace)
    group = "rbac.authorization.k8s.io"
    yield "v1", "ConfigMap", name, {"data": {SPEC_FILE: spec_text(fleet, values)}}
    if not fleet.scale.recommend:
        yield "v1", "ServiceAccount", name, {"automountServiceAccountToken": False}
        yield f"{group}/v1", "Role", name, {"rules": rules(fleet)}
        account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        yield f"{group}/v1", "RoleBinding", name, {
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [account],
        }  # fmt: skip
        yield "coordination.k8s.io/v1", "Lease", name, {"spec": {}}
    replicas = 1 if fleet.scale.recommend else kubernetes_of(fleet).controllers
    labels = labels_of(fleet, "controller")
    yield "apps/v1", "Deployment", name, {
        "spec": {
            "replicas": values.value("replicas.controller", replicas),
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": PodTemplates(fleet, values).controller(name, routers),
        }
    }  # fmt: skip
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    yield "policy/v1", "PodDisruptionBudget", name, {"spec": budget}
    no_ingress = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]}
    yield "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": no_ingress}
