"""What has Kubernetes start as many instances as a fleet with `[scale]` needs: for each role a HorizontalPodAutoscaler,
or KEDA's ScaledObject, which follows `kvferry_fleet_desired_instances` in the routers' metrics, or what routers answer
to GET /kvferry/plan. `kvferry fleet recommend`, in a Deployment, puts it there.

kvferry has decided already when they see a number: they follow at once, and without a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import PLAN_PATH
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import HTTP_PORT, Object, kubernetes_of, pod_of
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.control.desired_counts import most_of
from kvferry.fleet.spec.arguments import KEY_FIELDS, flag_name, variable_name
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, ScaleSpec, seconds

Kind = Literal["hpa", "keda", "none"]

METRIC = "kvferry_fleet_desired_instances"
METRIC_LABEL = "app_kubernetes_io_instance"
"""The label of the metric with the fleet's name: Prometheus' form of the label that pods have."""
_POLL_S = 10
_TOLERATED = 10
"""Number of instances from which an autoscaler of Kubernetes ignores one more or less: it tolerates a tenth."""


@dataclass(frozen=True)
class Autoscaling:
    """`prometheus`: its URL, for KEDA; without it, KEDA asks the routers."""

    kind: Kind = "none"
    prometheus: str = ""


NOT_SCALED = Autoscaling()


def chosen(fleet: DesiredFleet, asked: Kind | None, prometheus: str = "") -> Kind:
    """The autoscaler that is written. Default: an HPA for a fleet that is to be scaled, and can be. `prometheus`: as in
    `Autoscaling`. Raises `ConfigError` for one that could not do what the spec asks for."""
    why = why_not(fleet)
    asked = asked or ("none" if why else "hpa")
    if asked == "none":
        return asked
    if why:
        raise ConfigError(f"--autoscaler {asked}: {why}")
    assert fleet.scale is not None
    zero = _may_end_all(fleet, fleet.scale)
    if asked == "hpa" and zero:
        raise ConfigError(
            f"--autoscaler hpa: with {zero} a role may have no instance, and an HPA keeps one; --autoscaler keda does"
            " not"
        )
    if asked == "keda" and not prometheus and (keys := _keys_of(fleet)):
        raise ConfigError(
            f"--autoscaler keda: with {keys}, routers show what is wanted to nobody without a key; give --prometheus"
        )
    return asked


def _keys_of(fleet: DesiredFleet) -> str:
    """The flag that gives routers keys, or has them answer elsewhere; empty if there is none."""
    flags = [one.partition("=")[0].replace("_", "-") for one in fleet.router.args]
    secrets = pod_of(fleet, "router").secrets
    flags += [flag_name(name) for name in KEY_FIELDS if variable_name(name) in secrets]
    return next((one for one in flags if one.startswith(("--api-key", "--admin-"))), "")


def why_not(fleet: DesiredFleet) -> str:
    """Why no autoscaler can follow this fleet; empty if one can."""
    if fleet.scale is None:
        return "it follows what [scale] decides, and there is no such table"
    if fleet.scale.recommend:
        return "with scale.recommend, decisions are only said; leave that out to have them carried out"
    if fleet.unit is not None:
        return "units are objects of their own, which it cannot count; `kvferry fleet apply` scales them"
    if kubernetes_of(fleet).disaggregated_set:
        return "the roles of a DisaggregatedSet cannot be scaled apart; leave out disaggregated_set"
    return ""


def _may_end_all(fleet: DesiredFleet, scale: ScaleSpec) -> str:
    """The key by which a role may come to have no instance."""
    if seconds(scale.idle):
        return "scale.idle"
    prefill = fleet.role.get("prefill")
    return "scale.aggregate" if scale.aggregate and prefill is not None and not prefill.min else ""


def autoscaler(
    fleet: DesiredFleet, values: Values, role: MemberRole, told: Autoscaling, target: tuple[str, str, str]
) -> tuple[str, str, Object]:
    """Version, kind and spec of what scales a role. `target`: version, kind and name of what has its instances."""
    assert fleet.scale is not None
    least, most = fleet.role[role].min, most_of(fleet.role[role], fleet.scale)
    least = least if _may_end_all(fleet, fleet.scale) else max(1, least)
    bounds = values.value(f"autoscaling.{role}.min", least), values.value(f"autoscaling.{role}.max", most)
    version, kind, name = target
    reference = {"apiVersion": version, "kind": kind, "name": name}
    behavior = _behavior(most)
    if told.kind == "hpa":
        return "autoscaling/v2", "HorizontalPodAutoscaler", _hpa(fleet, role, reference, bounds, behavior)
    return "keda.sh/v1alpha1", "ScaledObject", {
        "scaleTargetRef": reference,
        "minReplicaCount": bounds[0],
        "maxReplicaCount": bounds[1],
        "pollingInterval": _POLL_S,
        "cooldownPeriod": 0,  # before the last one ends: `idle` is over already
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [_trigger(fleet, values, role, told)],
    }  # fmt: skip


def _hpa(fleet: DesiredFleet, role: MemberRole, target: Object, bounds: tuple[Any, Any], behavior: Object) -> Object:
    """An autoscaler's spec: with a mean of one for each pod, as many pods are wanted as the metric says."""
    selector = {"matchLabels": {METRIC_LABEL: fleet.name, "role": role}}
    external = {
        "metric": {"name": METRIC, "selector": selector},
        "target": {"type": "AverageValue", "averageValue": "1"},
    }
    return {
        "scaleTargetRef": target,
        "minReplicas": bounds[0],
        "maxReplicas": bounds[1],
        "behavior": behavior,
        "metrics": [{"type": "External", "external": external}],
    }


def _trigger(fleet: DesiredFleet, values: Values, role: MemberRole, told: Autoscaling) -> Object:
    """KEDA's trigger. Where nothing is known of the number, nothing is scaled."""
    if told.prometheus:
        return {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": _of_prometheus(fleet, values, role, told),
        }
    namespace = values.within_text(kubernetes_of(fleet).namespace)
    asked = {
        "url": f"http://{fleet.name}.{namespace}:{HTTP_PORT}{PLAN_PATH}",
        "format": "json",
        "valueLocation": f"desired.{role}",
        "targetValue": "1",
        "activationTargetValue": "0",
    }
    return {"type": "metrics-api", "metricType": "AverageValue", "metadata": asked}


def _of_prometheus(fleet: DesiredFleet, values: Values, role: MemberRole, told: Autoscaling) -> Object:
    """What KEDA asks Prometheus. It would take a metric that is not there for 0."""
    namespace = values.quoted_namespace(kubernetes_of(fleet).namespace)
    labels = f'namespace={namespace},{METRIC_LABEL}="{fleet.name}",role="{role}"'
    return {
        "serverAddress": values.value("prometheus", told.prometheus),
        "query": f"max({METRIC}{{{labels}}})",
        "threshold": "1",
        "activationThreshold": "0",
        "ignoreNullValues": "false",
    }


def _behavior(most: int) -> Object:
    """Down as fast as up. `tolerance` is known to Kubernetes from 1.33 on, and is left out where it changes nothing."""
    exact: Object = {"tolerance": "0"} if most >= _TOLERATED else {}
    policies = [{"type": "Percent", "value": 100, "periodSeconds": 15}]
    up = [*policies, {"type": "Pods", "value": max(4, most), "periodSeconds": 15}]
    return {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": up, **exact},
        "scaleDown": {"stabilizationWindowSeconds": 0, "policies": policies, **exact},
    }


def bounded(fleet: DesiredFleet) -> DesiredFleet:
    """The fleet with the bounds of its autoscalers, for who recommends."""
    assert fleet.scale is not None
    roles = {role: msgspec.structs.replace(one, max=most_of(one, fleet.scale)) for role, one in fleet.role.items()}
    return msgspec.structs.replace(fleet, role=roles)
