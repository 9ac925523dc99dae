"""A fleet as objects of Kubernetes: `kvferry fleet render`. Pure: the spec in, objects out.

    pooling   each role is a Deployment, or a LeaderWorkerSet where an instance has several pods; or all roles are one
              DisaggregatedSet
    replica   each unit has objects of its own, and routers of its own, so that hand-offs stay within it
    [scale]   a Deployment that says how many instances are needed, and autoscalers that follow it (`autoscaling`)

Or kvferry's own controller makes the pods, and only that and what it needs is written (`controller`).

Routers have names of their own (a StatefulSet), because every instance registers at each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.manifests.autoscaling import NOT_SCALED, Autoscaling, autoscaler, bounded
from kvferry.fleet.backends.kubernetes.manifests.controller_objects import (
    controller_objects,
    require_plain_pods,
    spec_text,
)
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import (
    ALONE,
    FLEET_LABEL,
    HTTP_PORT,
    LWS_LEADER,
    LWS_WORKER,
    SPEC_FILE,
    InstancePod,
    Object,
    Pods,
    kubernetes_of,
    labels_of,
    member_roles,
    pod_of,
    ranks_service,
    token_secret,
)
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.spec.fleet_spec import DesiredFleet, Role, seconds

_LWS, _SET, _MONITOR = "leaderworkerset.x-k8s.io/v1", "disaggregatedset.x-k8s.io/v1", "monitoring.coreos.com/v1"
_VOLCANO, _SCHEDULING = "scheduling.volcano.sh/v1beta1", "scheduling.k8s.io/v1beta1"
_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
"""The label that Prometheus' operator gives the pods which a PodMonitor tells whom to ask."""


def render(fleet: DesiredFleet, values: Values, token: str = "", autoscaling: Autoscaling = NOT_SCALED) -> list[Object]:
    """All objects of a fleet whose pods Kubernetes' own controllers make. `token`: KVFERRY_AUTH_TOKEN for the Secret,
    which is left out without it. `autoscaling`: as `chosen`. Raises `ConfigError` for what pods cannot do."""
    check(fleet)
    return [*_Rendering(fleet, values, autoscaling).objects(token)]


def render_controller(fleet: DesiredFleet, values: Values, token: str = "") -> list[Object]:
    """kvferry's controller, which makes the pods, and what pods need beside them. `token`: as for `render`. Raises
    `ConfigError` for what it cannot do."""
    check(fleet)
    require_plain_pods(fleet)
    return [*_Rendering(fleet, values).controlled(token)]


def support(fleet: DesiredFleet, values: Values, token: str = "") -> list[Object]:
    """What pods that are made one by one need beside them, but for their budgets. `token`: as for `render`."""
    return [*_Rendering(fleet, values).beside_plain_pods(token)]


def budgets(fleet: DesiredFleet, values: Values, counts: Mapping[str, int]) -> list[Object]:
    """The PodDisruptionBudgets of pods that are made one by one. `counts`: of each role, how many there are."""
    return [*_Rendering(fleet, values).disruption_budgets(counts)]


def check(fleet: DesiredFleet) -> None:
    """Raise `ConfigError` for a fleet that cannot be rendered."""
    if fleet.backend.kubernetes is None:
        raise ConfigError('there is no table [backend.kubernetes] (with kind = "kubernetes" in [backend])')
    kubernetes = fleet.backend.kubernetes
    for where, given, instead in (
        ("engine.kv_transfer_config", fleet.engine.kv_transfer_config, "engine.connector"),
        ("args", fleet.args, "args of [engine], of a role or of [router]"),
    ):
        if given:
            raise ConfigError(f"{where} is not for pods; use {instead}")
    if not fleet.name[0].isalpha():
        raise ConfigError(
            f"name = {fleet.name!r}: on Kubernetes it must begin with a letter, as the names of Services do"
        )
    for role, one in kubernetes.pod.items():
        where = f"backend.kubernetes.pod.{role}.hosts = {one.hosts}"
        if one.hosts == 1:
            continue
        if role in ("router", "controller"):
            raise ConfigError(f"{where}: only instances can be on several pods")
        wanted = next((each for name, each in fleet.role.items() if name == role), None)
        if wanted is None or wanted.tensor_parallel_size % one.hosts:
            raise ConfigError(f"{where}: role.{role}.tensor_parallel_size must be a multiple of it")
        if fleet.engine.kind == "kvferry" and wanted.tensor_parallel_size != one.hosts:
            raise ConfigError(
                f"{where}: of kvferry's engine, each rank has a pod of its own, and role.{role}.tensor_parallel_size is"
                f" {wanted.tensor_parallel_size}"
            )
    if kubernetes.disaggregated_set and (fleet.unit is not None or len(fleet.role) < 2):
        raise ConfigError('backend.kubernetes.disaggregated_set is for mode = "pooling" with two roles or more')


@dataclass(frozen=True)
class _Part:
    """A fleet in pooling mode, or one unit. `counts`: the instances of each role."""

    name: str
    unit: int | None
    counts: dict[Role, int]


class _Rendering:
    def __init__(self, fleet: DesiredFleet, values: Values, autoscaling: Autoscaling = NOT_SCALED) -> None:
        self._fleet, self._values, self._kubernetes = fleet, values, kubernetes_of(fleet)
        self._autoscaling = autoscaling
        self._pods = Pods(fleet, values)

    def objects(self, token: str) -> Iterator[Object]:
        yield from self.support(token)
        yield from self.disruption_budgets(None)
        for part in self._parts():
            yield from self._routers(part)
            yield from self._instances(part)
            if self._kubernetes.gang != "none":
                yield self._pod_group(part)
            if self._fleet.scale is not None and part.unit is None:
                yield from self._scaled(part)

    def controlled(self, token: str) -> Iterator[Object]:
        yield from self.beside_plain_pods(token)
        for version, kind, name, content in controller_objects(self._fleet, self._values):
            yield self._object(version, kind, name, more=content)

    def beside_plain_pods(self, token: str) -> Iterator[Object]:
        yield from self.support(token)
        if any(one.hosts > 1 for one in self._kubernetes.pod.values()):
            yield self._service(ranks_service(self._fleet), labels_of(self._fleet), headless=True)

    def _scaled(self, part: _Part) -> Iterator[Object]:
        """The objects that say how many instances are needed, and those that have Kubernetes start them."""
        spec = {SPEC_FILE: spec_text(bounded(self._fleet), self._values)}
        yield self._object("v1", "ConfigMap", f"{part.name}-controller", more={"data": spec})
        deployment = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels_of(self._fleet, "controller")},
            "template": self._pods.recommender(self._router_urls(part), f"{part.name}-controller"),
        }
        yield self._object("apps/v1", "Deployment", f"{part.name}-controller", deployment)
        if self._is_autoscaled:
            for role in part.counts:
                name = f"{part.name}-{role}"
                target = (*self._kind_of(role), name)
                version, kind, spec_of = autoscaler(self._fleet, self._values, role, self._autoscaling, target)
                yield self._object(version, kind, name, spec_of)

    @property
    def _is_autoscaled(self) -> bool:
        return self._autoscaling.kind != "none"

    def _kind_of(self, role: Role) -> tuple[str, str]:
        """Version and kind of what has the instances of a role."""
        return (_LWS, "LeaderWorkerSet") if pod_of(self._fleet, role).hosts > 1 else ("apps/v1", "Deployment")

    def support(self, token: str) -> Iterator[Object]:
        fleet = self._fleet
        if self._kubernetes.token_secret is None and (token or self._values.chart):
            secret = {"type": "Opaque", "stringData": {"token": self._values.secret("token", token)}}
            yield self._object("v1", "Secret", token_secret(fleet), more=secret)
        yield self._service(fleet.name, labels_of(fleet, "router"), headless=False)
        yield from self._network_policies()
        if self._kubernetes.pod_monitor:
            yield self._pod_monitor()

    def _parts(self) -> list[_Part]:
        fleet = self._fleet
        if fleet.unit is None:
            return [_Part(fleet.name, None, {role: one.count for role, one in fleet.role.items() if role != "router"})]
        members = dict(fleet.unit.members)
        return [_Part(f"{fleet.name}-{number}", number, members) for number in range(fleet.unit.count)]

    def _routers(self, part: _Part) -> Iterator[Object]:
        labels = labels_of(self._fleet, "router", part.unit)
        yield self._service(f"{part.name}-routers", labels, headless=True)
        spec = {
            "serviceName": f"{part.name}-routers",
            "replicas": self._kubernetes.routers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": self._pods.router(unit=part.unit),
        }
        yield self._object("apps/v1", "StatefulSet", f"{part.name}-router", spec)

    def _router_urls(self, part: _Part) -> list[str]:
        numbers = range(self._kubernetes.routers)
        return [f"http://{part.name}-router-{number}.{part.name}-routers:{HTTP_PORT}" for number in numbers]

    def _instances(self, part: _Part) -> Iterator[Object]:
        if self._kubernetes.disaggregated_set:
            roles = [{"name": role, "spec": self._leader_worker_set(part, role)} for role in part.counts]
            yield self._object(_SET, "DisaggregatedSet", part.name, {"roles": roles})
            return
        for role in part.counts:
            version, kind = self._kind_of(role)
            spec = (self._leader_worker_set if version == _LWS else self._deployment)(part, role)
            yield self._object(version, kind, f"{part.name}-{role}", spec)

    def _deployment(self, part: _Part, role: Role) -> Object:
        roll = self._fleet.roll
        return {
            **self._replicas(part, role),
            "paused": roll.pause,
            "revisionHistoryLimit": roll.history,
            "progressDeadlineSeconds": int(seconds(self._fleet.failure.start)) + 60,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": roll.surge, "maxUnavailable": roll.unavailable},
            },
            "selector": {"matchLabels": labels_of(self._fleet, role, part.unit)},
            "template": self._template(part, role),
        }

    def _leader_worker_set(self, part: _Part, role: Role) -> Object:
        hosts, roll = pod_of(self._fleet, role).hosts, self._fleet.roll
        pods: Object = {"size": hosts, "restartPolicy": "RecreateGroupOnPodRestart"}
        if hosts > 1:
            pods["leaderTemplate"] = self._template(part, role, LWS_LEADER)
        pods["workerTemplate"] = self._template(part, role, LWS_WORKER if hosts > 1 else ALONE)
        return {
            **self._replicas(part, role),
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": roll.surge, "maxUnavailable": roll.unavailable},
            },
            "leaderWorkerTemplate": pods,
        }

    def _template(self, part: _Part, role: Role, host: InstancePod = ALONE) -> Object:
        return self._pods.instance(role, self._router_urls(part), unit=part.unit, group=part.name, host=host)

    def _replicas(self, part: _Part, role: Role) -> Object:
        """How many, unless an autoscaler decides, whose count would be taken back each time that this is applied."""
        return {} if self._is_autoscaled else {"replicas": self._values.value(f"replicas.{role}", part.counts[role])}

    def _pod_group(self, part: _Part) -> Object:
        """All instances of a part start together or not at all; those that a roll starts later join them."""
        counts = dict(part.counts)
        if self._is_autoscaled:
            counts = {role: max(1, self._fleet.role[role].min) for role in counts}
        least = sum(count * pod_of(self._fleet, role).hosts for role, count in counts.items())
        if self._kubernetes.gang == "volcano":
            return self._object(_VOLCANO, "PodGroup", part.name, {"minMember": least})
        policy = {"schedulingPolicy": {"gang": {"minCount": least}}}
        return self._object(_SCHEDULING, "PodGroup", part.name, policy)

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

    def disruption_budgets(self, counts: Mapping[str, int] | None) -> Iterator[Object]:
        """Budgets that let one pod of each role at a time be moved off its node. Kubernetes knows only of Deployments
        and their like how many there are to be; for plain pods, it is told."""
        fleet = self._fleet
        for role in member_roles(fleet):
            bound = {"maxUnavailable": 1} if counts is None else {"minAvailable": max(0, counts.get(role, 0) - 1)}
            spec = {**bound, "selector": {"matchLabels": labels_of(fleet, role)}}
            yield self._object("policy/v1", "PodDisruptionBudget", f"{fleet.name}-{role}", spec)

    def _network_policies(self) -> Iterator[Object]:
        """Instances are reached by routers and by each other, routers by clients and instances; nothing else is."""
        fleet, http = self._fleet, [{"port": "http"}]
        router, controller = (
            {"podSelector": {"matchLabels": labels_of(fleet, one)}} for one in ("router", "controller")
        )
        roles = sorted(fleet.role if fleet.unit is None else fleet.unit.members)
        instances = {
            "matchLabels": labels_of(fleet),
            "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "In", "values": roles}],
        }
        spec = {
            "podSelector": instances,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [router, controller], "ports": http}, {"from": [{"podSelector": instances}]}],
        }
        yield self._object("networking.k8s.io/v1", "NetworkPolicy", f"{fleet.name}-instances", spec)
        clients = self._kubernetes.clients_from
        rules: list[Object] = [{"from": [{"podSelector": instances}, controller], "ports": http}]
        if clients:
            allowed = [clients, *([_PROMETHEUS] if self._kubernetes.pod_monitor else [])]
            peers = [{"namespaceSelector": {}, "podSelector": {"matchLabels": one}} for one in allowed]
            rules.append({"from": peers, "ports": http})
        else:
            rules = [{"ports": http}]
        spec = {"podSelector": router["podSelector"], "policyTypes": ["Ingress"], "ingress": rules}
        yield self._object("networking.k8s.io/v1", "NetworkPolicy", f"{fleet.name}-router", spec)

    def _pod_monitor(self) -> Object:
        """The routers' metrics, and through them those of all instances, which Prometheus need not reach."""
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
        found: Object = {"apiVersion": version, "kind": kind, "metadata": metadata, **(more or {})}
        return found if spec is None else {**found, "spec": spec}
