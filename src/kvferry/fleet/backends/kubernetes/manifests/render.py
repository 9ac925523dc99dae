"""A fleet as objects of Kubernetes: `kvferry fleet render`. Pure: the spec in, objects out.

    pooling   each role is a Deployment, or a LeaderWorkerSet where an instance has several pods
    replica   each unit has objects of its own, and routers of its own, so that hand-offs stay within it
    [scale]   a controller that decides how many instances there are, and scales these objects (`controller_objects`)

Routers have names of their own (a StatefulSet), because every instance registers at each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.manifests.controller_objects import LWS, controller_objects, workload_of
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import (
    FLEET_LABEL,
    HTTP_PORT,
    LWS_LEADER,
    LWS_WORKER,
    SINGLE_POD,
    InstancePod,
    Object,
    PodTemplates,
    kubernetes_of,
    labels_of,
    member_roles,
    pod_of,
    token_secret,
)
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.spec.fleet_spec import DesiredFleet, Role, seconds

_MONITOR = "monitoring.coreos.com/v1"
_VOLCANO, _SCHEDULING = "scheduling.volcano.sh/v1beta1", "scheduling.k8s.io/v1beta1"
_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
"""The label that Prometheus' operator gives to Prometheus' pods."""


def render(fleet: DesiredFleet, values: Values, token: str = "") -> list[Object]:
    """All objects of a fleet. `token`: KVFERRY_AUTH_TOKEN for the Secret, which is left out without it. Raises
    `ConfigError` for a fleet that cannot run as pods."""
    check(fleet)
    return [*_Rendering(fleet, values).objects(token)]


def check(fleet: DesiredFleet) -> None:
    """Raise `ConfigError` for a fleet that cannot be rendered."""
    if fleet.backend.kubernetes is None:
        raise ConfigError('there is no table [backend.kubernetes] (with kind = "kubernetes" in [backend])')
    kubernetes = fleet.backend.kubernetes
    for where, setting, instead in (
        ("engine.kv_transfer_config", fleet.engine.kv_transfer_config, "engine.connector"),
        ("args", fleet.args, "args of [engine], of a role or of [router]"),
        (next(iter(fleet.keys.fleet), ""), fleet.keys.fleet, "the key in [engine], a role or [router]"),
    ):
        if setting:
            raise ConfigError(f"{where} is not for pods; use {instead}")
    if not fleet.name[0].isalpha():
        raise ConfigError(
            f"name = {fleet.name!r}: on Kubernetes it must begin with a letter, as the names of Services do"
        )
    for role, pod in kubernetes.pod.items():
        where = f"backend.kubernetes.pod.{role}.hosts = {pod.hosts}"
        if pod.hosts == 1:
            continue
        if role in ("router", "controller"):
            raise ConfigError(f"{where}: only instances can be on several pods")
        role_spec = next((each for name, each in fleet.role.items() if name == role), None)
        if role_spec is None or role_spec.tensor_parallel_size % pod.hosts:
            raise ConfigError(f"{where}: role.{role}.tensor_parallel_size must be a multiple of it")
        if fleet.engine.kind == "kvferry" and role_spec.tensor_parallel_size != pod.hosts:
            raise ConfigError(
                f"{where}: of kvferry's engine, each rank has a pod of its own, and role.{role}.tensor_parallel_size is"
                f" {role_spec.tensor_parallel_size}"
            )
    _require_plain_workloads(fleet)


def _require_plain_workloads(fleet: DesiredFleet) -> None:
    """Raise `ConfigError` for keys of fleets whose members kvferry starts itself."""
    for role, spec in fleet.role.items():
        if spec.can_be:
            raise ConfigError(
                f"role.{role}.can_be: a pod keeps the role of its Deployment; leave can_be out, and [scale] starts and"
                " ends pods instead"
            )
    if fleet.unit is not None and fleet.failure.restart == "unit":
        raise ConfigError('failure.restart = "unit": Kubernetes restarts the pod that failed; leave it out')
    if fleet.unit is not None and fleet.scale is not None:
        raise ConfigError('[scale] is for mode = "pooling" on Kubernetes; set unit.count and render again')


@dataclass(frozen=True)
class _UnitPlan:
    """A fleet in pooling mode, or one unit. `counts`: the instances of each role."""

    name: str
    unit: int | None
    counts: dict[Role, int]


class _Rendering:
    def __init__(self, fleet: DesiredFleet, values: Values) -> None:
        self._fleet, self._values, self._kubernetes = fleet, values, kubernetes_of(fleet)
        self._pods = PodTemplates(fleet, values)

    def objects(self, token: str) -> Iterator[Object]:
        yield from self._support(token)
        yield from self._disruption_budgets()
        for plan in self._plans():
            yield from self._routers(plan)
            yield from self._instances(plan)
            if self._kubernetes.gang != "none":
                yield self._pod_group(plan)
            if self._fleet.scale is not None:
                for version, kind, name, content in controller_objects(
                    self._fleet, self._values, self._router_urls(plan)
                ):
                    yield self._object(version, kind, name, more=content)

    @property
    def _is_scaled(self) -> bool:
        """True if the controller sets the counts of instances."""
        return self._fleet.scale is not None and not self._fleet.scale.recommend

    def _support(self, token: str) -> Iterator[Object]:
        fleet = self._fleet
        if self._kubernetes.token_secret is None and (token or self._values.chart):
            secret = {"type": "Opaque", "stringData": {"token": self._values.secret("token", token)}}
            yield self._object("v1", "Secret", token_secret(fleet), more=secret)
        yield self._service(fleet.name, labels_of(fleet, "router"), headless=False)
        yield from self._network_policies()
        if self._kubernetes.pod_monitor:
            yield self._pod_monitor()

    def _plans(self) -> list[_UnitPlan]:
        fleet = self._fleet
        if fleet.unit is None:
            return [
                _UnitPlan(
                    fleet.name,
                    None,
                    {role: role_spec.count for role, role_spec in fleet.role.items() if role != "router"},
                )
            ]
        members = dict(fleet.unit.members)
        return [_UnitPlan(f"{fleet.name}-{number}", number, members) for number in range(fleet.unit.count)]

    def _routers(self, plan: _UnitPlan) -> Iterator[Object]:
        labels = labels_of(self._fleet, "router", plan.unit)
        yield self._service(f"{plan.name}-routers", labels, headless=True)
        spec = {
            "serviceName": f"{plan.name}-routers",
            "replicas": self._kubernetes.routers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": self._pods.router(unit=plan.unit),
        }
        yield self._object("apps/v1", "StatefulSet", f"{plan.name}-router", spec)

    def _router_urls(self, plan: _UnitPlan) -> list[str]:
        numbers = range(self._kubernetes.routers)
        return [f"http://{plan.name}-router-{number}.{plan.name}-routers:{HTTP_PORT}" for number in numbers]

    def _instances(self, plan: _UnitPlan) -> Iterator[Object]:
        for role in plan.counts:
            version, kind, name = workload_of(self._fleet, role)
            spec = (self._leader_worker_set if version == LWS else self._deployment)(plan, role)
            yield self._object(version, kind, name if plan.unit is None else f"{plan.name}-{role}", spec)

    def _deployment(self, plan: _UnitPlan, role: Role) -> Object:
        roll = self._fleet.roll
        return {
            **self._replicas(plan, role),
            "paused": roll.pause,
            "revisionHistoryLimit": roll.history,
            "progressDeadlineSeconds": int(seconds(self._fleet.failure.start)) + 60,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": roll.surge, "maxUnavailable": roll.unavailable},
            },
            "selector": {"matchLabels": labels_of(self._fleet, role, plan.unit)},
            "template": self._template(plan, role),
        }

    def _leader_worker_set(self, plan: _UnitPlan, role: Role) -> Object:
        roll = self._fleet.roll
        pods: Object = {
            "size": pod_of(self._fleet, role).hosts,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": self._template(plan, role, LWS_LEADER),
            "workerTemplate": self._template(plan, role, LWS_WORKER),
        }
        return {
            **self._replicas(plan, role),
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": roll.surge, "maxUnavailable": roll.unavailable},
            },
            "leaderWorkerTemplate": pods,
        }

    def _template(self, plan: _UnitPlan, role: Role, pod: InstancePod = SINGLE_POD) -> Object:
        return self._pods.instance(role, self._router_urls(plan), unit=plan.unit, group=plan.name, pod=pod)

    def _replicas(self, plan: _UnitPlan, role: Role) -> Object:
        """The count, unless the controller sets it: applying the manifests again would undo its decision."""
        return {} if self._is_scaled else {"replicas": self._values.value(f"replicas.{role}", plan.counts[role])}

    def _pod_group(self, plan: _UnitPlan) -> Object:
        """A pod group: all instances of the plan start together or not at all. Instances that a roll starts later join
        the group."""
        counts = dict(plan.counts)
        if self._is_scaled:
            counts = {role: max(1, self._fleet.role[role].min) for role in counts}
        min_members = sum(count * pod_of(self._fleet, role).hosts for role, count in counts.items())
        if self._kubernetes.gang == "volcano":
            return self._object(_VOLCANO, "PodGroup", plan.name, {"minMember": min_members})
        policy = {"schedulingPolicy": {"gang": {"minCount": min_members}}}
        return self._object(_SCHEDULING, "PodGroup", plan.name, policy)

    def _service(self, name: str, selector: dict[str, str], *, headless: bool) -> Object:
        """A Service. For clients: the routers that are ready. Headless, for instances: each router by name, ready or
        not, since one is ready only when instances have registered; or each first pod of several, which is ready when
        the others have joined it."""
        spec: Object = {
            "selector": selector,
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}],
        }
        if headless:
            spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        return self._object("v1", "Service", name, spec)

    def _disruption_budgets(self) -> Iterator[Object]:
        """Disruption budgets, which allow the eviction of one pod of each role at a time."""
        for role in member_roles(self._fleet):
            spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels_of(self._fleet, role)}}
            yield self._object("policy/v1", "PodDisruptionBudget", f"{self._fleet.name}-{role}", spec)

    def _network_policies(self) -> Iterator[Object]:
        """A network policy: routers and instances may connect to instances, clients and instances to routers. Nothing
        else is allowed."""
        fleet, http = self._fleet, [{"port": "http"}]
        router, controller = (
            {"podSelector": {"matchLabels": labels_of(fleet, component)}} for component in ("router", "controller")
        )
        roles = sorted(fleet.role if fleet.unit is None else fleet.unit.members)
        instances = {
            "matchLabels": labels_of(fleet),
            "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "In", "values": roles}],
        }
        spec = {
            "podSelector": instances,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [router], "ports": http}, {"from": [{"podSelector": instances}]}],
        }
        yield self._object("networking.k8s.io/v1", "NetworkPolicy", f"{fleet.name}-instances", spec)
        clients = self._kubernetes.clients_from
        rules: list[Object] = [{"from": [{"podSelector": instances}, controller], "ports": http}]
        if clients:
            allowed = [clients, *([_PROMETHEUS] if self._kubernetes.pod_monitor else [])]
            peers = [{"namespaceSelector": {}, "podSelector": {"matchLabels": pod_labels}} for pod_labels in allowed]
            rules.append({"from": peers, "ports": http})
        else:
            rules = [{"ports": http}]
        spec = {"podSelector": router["podSelector"], "policyTypes": ["Ingress"], "ingress": rules}
        yield self._object("networking.k8s.io/v1", "NetworkPolicy", f"{fleet.name}-router", spec)

    def _pod_monitor(self) -> Object:
        """A monitor of the routers' metrics, which include all instances', so that Prometheus need not reach them."""
        endpoint = {"port": "http", "path": "/metrics", "params": {"instances": ["all"]}}
        spec = {
            "selector": {"matchLabels": labels_of(self._fleet, "router")},
            "podMetricsEndpoints": [endpoint],
            "podTargetLabels": [FLEET_LABEL],
        }
        return self._object(_MONITOR, "PodMonitor", self._fleet.name, spec)

    def _object(
        self, version: str, kind: str, name: str, spec: Object | None = None, more: Object | None = None
    ) -> Object:
        namespace = self._values.namespace(self._kubernetes.namespace)
        metadata = {"name": name, "namespace": namespace, "labels": labels_of(self._fleet)}
        rendered: Object = {"apiVersion": version, "kind": kind, "metadata": metadata, **(more or {})}
        return rendered if spec is None else {**rendered, "spec": spec}
