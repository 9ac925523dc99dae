"""kvferry's own controller as objects of Kubernetes, for a fleet whose pods it makes one by one.

It follows its spec, which is a ConfigMap: pods belong to that, and Kubernetes deletes them with it. What never changes
while the fleet runs (the Service, the token, policies) is written here, so that the controller need not be allowed to
write it; of the objects that it keeps up to date, it may change those of its own fleet alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.core.errors import ConfigError
from kvferry.core.settings.toml_file import to_toml
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import (
    SPEC_FILE,
    Object,
    Pods,
    kubernetes_of,
    labels_of,
    member_roles,
)
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.fleet.spec.spec_file import to_table


def key_needing_controller(fleet: DesiredFleet) -> str:
    """The key by which a spec asks for what Kubernetes' own controllers do not do; empty if none does."""
    for role, one in fleet.role.items():
        if one.can_be:
            return f"role.{role}.can_be"
    if fleet.scale is not None and not fleet.scale.recommend:
        return "[scale]"
    if fleet.unit is not None and fleet.failure.restart == "unit":
        return 'failure.restart = "unit"'
    return ""


def require_plain_pods(fleet: DesiredFleet) -> None:
    """Raise `ConfigError` for what Kubernetes' own controllers do with pods, and kvferry's does not."""
    told = kubernetes_of(fleet)
    for what, is_asked in (
        ("gang", told.gang != "none"),
        ("disaggregated_set", told.disaggregated_set),
    ):
        if is_asked:
            raise ConfigError(
                f"backend.kubernetes.{what} is for manifests without kvferry's controller (`kvferry fleet render"
                " --controller kubernetes`), which makes plain pods"
            )


def controller_name(fleet: DesiredFleet) -> str:
    """The name of all objects of a fleet's controller."""
    return f"{fleet.name}-controller"


def spec_text(fleet: DesiredFleet, values: Values) -> str:
    """The spec as the file that a controller in the cluster follows."""
    table = to_table(fleet)
    kubernetes = table["backend"]["kubernetes"]
    kubernetes.pop("context", None)  # within the cluster, the account of the pod counts
    kubernetes["image"] = values.value("image", kubernetes_of(fleet).image)
    kubernetes["namespace"] = values.namespace(kubernetes_of(fleet).namespace)
    for role, one in fleet.role.items():
        said = table["role"][role]
        bounds = {key: values.value(f"autoscaling.{role}.{key}", said[key]) for key in ("min", "max") if key in said}
        table["role"][role] = {**said, "count": values.value(f"replicas.{role}", one.count), **bounds}
    if fleet.unit is not None:
        table["unit"]["count"] = values.value("replicas.unit", fleet.unit.count)
    return values.within(to_toml(table))


def rules(fleet: DesiredFleet) -> list[dict[str, Any]]:
    """What the controller asks of the API server, and no more: it reads the object that its pods belong to, holds the
    Lease, and keeps pods and their budgets."""
    name = controller_name(fleet)
    budgets = [f"{fleet.name}-{role}" for role in member_roles(fleet)]
    changes = ["patch"] if any(one.can_be for one in fleet.role.values()) else []  # a role is a label
    return [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get"]},
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "verbs": ["get", "list", "watch", "create", "delete", *changes],
        },
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [name],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "resourceNames": budgets, "verbs": ["patch"]},
    ]


def controller_objects(fleet: DesiredFleet, values: Values) -> Iterator[tuple[str, str, str, Object]]:
    """Version, kind, name and content of all that is the controller's."""
    name = controller_name(fleet)
    namespace = values.namespace(kubernetes_of(fleet).namespace)
    group = "rbac.authorization.k8s.io"
    yield "v1", "ConfigMap", name, {"data": {SPEC_FILE: spec_text(fleet, values)}}
    yield "v1", "ServiceAccount", name, {"automountServiceAccountToken": False}
    yield f"{group}/v1", "Role", name, {"rules": rules(fleet)}
    account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    yield f"{group}/v1", "RoleBinding", name, {
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [account],
    }  # fmt: skip
    yield "coordination.k8s.io/v1", "Lease", name, {"spec": {}}
    number, labels = kubernetes_of(fleet).controllers, labels_of(fleet, "controller")
    yield "apps/v1", "Deployment", name, {
        "spec": {
            "replicas": values.value("replicas.controller", number),
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": Pods(fleet, values).controller(name),
        }
    }  # fmt: skip
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    yield "policy/v1", "PodDisruptionBudget", name, {"spec": budget}
    nobody = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]}
    yield "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": nobody}
    for role in member_roles(fleet):  # its least number follows the pods that there are
        yield "policy/v1", "PodDisruptionBudget", f"{fleet.name}-{role}", {
            "spec": {"selector": {"matchLabels": labels_of(fleet, role)}}
        }  # fmt: skip
