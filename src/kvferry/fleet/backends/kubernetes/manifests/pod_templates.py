"""The pods of a fleet: their containers, probes, drain hooks and permissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from kvferry.core.settings.environment import AUTH_TOKEN, STATE_DIR
from kvferry.core.settings.flags import overridden, to_flags, variable_name
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, Role, seconds
from kvferry.fleet.spec.kubernetes_spec import KubernetesSpec, PodRole, PodSpec
from kvferry.fleet.spec.variables import flag_variables

Object = dict[str, Any]

HTTP_PORT, KV_PORT, RANKS_PORT = 8000, 8101, 7000
SPEC_FILE, _SPEC_FOLDER, _STATE_FOLDER = "fleet.toml", "/spec", "/cache/state"
_USER = 1000
_NAME_LABEL, COMPONENT_LABEL, FLEET_LABEL, UNIT_LABEL = (
    "app.kubernetes.io/name", "app.kubernetes.io/component", "app.kubernetes.io/instance", "kvferry/unit",
)  # fmt: skip


def labels_of(fleet: DesiredFleet, component: str = "", unit: int | None = None) -> dict[str, str]:
    """The labels that select the pods of a fleet. `component`: only the pods of this role, or "router" or "controller".
    `unit`: only the pods of this unit."""
    labels = {_NAME_LABEL: "kvferry", FLEET_LABEL: fleet.name}
    if component:
        labels[COMPONENT_LABEL] = component
    if unit is not None:
        labels[UNIT_LABEL] = str(unit)
    return labels


def kubernetes_of(fleet: DesiredFleet) -> KubernetesSpec:
    """The table `[backend.kubernetes]` of a fleet. `spec` has checked that the fleet has one."""
    assert fleet.backend.kubernetes is not None
    return fleet.backend.kubernetes


def pod_of(fleet: DesiredFleet, role: PodRole) -> PodSpec:
    """The spec of the pods of a role."""
    return kubernetes_of(fleet).pod.get(role, PodSpec())


def member_roles(fleet: DesiredFleet) -> list[MemberRole]:
    """The roles of all members of a fleet."""
    return [*(fleet.role if fleet.unit is None else fleet.unit.members), "router"]


@dataclass(frozen=True)
class InstancePod:
    """A pod of an instance. `index`: its index in the instance, or the variable that has it; pod 0 answers requests.
    `leader`: the host name of pod 0."""

    index: str
    leader: str


FIRST = "0"
SINGLE_POD = InstancePod(FIRST, "")
LWS_LEADER, LWS_WORKER = (InstancePod(index, "$(LWS_LEADER_ADDRESS)") for index in (FIRST, "$(LWS_WORKER_INDEX)"))
"""The pods of a LeaderWorkerSet, whose controller sets these variables."""


class PodTemplates:
    """Renders the pod templates of one fleet."""

    lock_age_s = 60
    """A controller writes to its lock file every second. If the file is older than these seconds, the controller counts
    as hung."""
    grace_s = 15
    """Seconds for requests that still run after a drain, or that arrive after it."""
    margin_s = 30
    """Seconds after its drain in which a pod must end before it is killed."""

    def __init__(self, fleet: DesiredFleet, values: Values) -> None:
        self._fleet, self._values, self._kubernetes = fleet, values, kubernetes_of(fleet)
        self._drain_s = int(seconds(fleet.failure.drain))

    def instance(
        self,
        role: Role,
        routers: Sequence[str],
        *,
        unit: int | None,
        group: str,
        pod: InstancePod = SINGLE_POD,
    ) -> Object:
        """The template of the pods of an instance, which register at `routers`. `pod`: which pod of the instance.
        `group`: name of the group of pods that are scheduled together."""
        container = self._container(role)
        if pod.index != FIRST:
            container["command"] = self._worker(role, pod)
        else:
            command = "prefill" if role == "prefill" else "decode"
            container["command"] = ["kvferry", command, self._fleet.model]
            container["args"] = self._values.value(f"arguments.{role}", self._arguments(role, pod))
            container["env"].append({"name": variable_name("register"), "value": ",".join(routers)})
            container |= self._instance_probes() | self._drain_hook(routers)
            container["ports"] = [{"name": "http", "containerPort": HTTP_PORT}]
        template = self._template(role, container, unit)
        template["spec"]["terminationGracePeriodSeconds"] = self._drain_s + self.margin_s
        return self._in_group(self._placed(template, unit), group)

    def router(self, *, unit: int | None) -> Object:
        """The template of a router's pods."""
        container = self._container("router")
        container["command"] = ["kvferry", "router"]
        arguments = ["--host=0.0.0.0", f"--port={HTTP_PORT}", "--registration", f"--grace-s={self._drain_s}"]
        arguments += [*to_flags(self._fleet.keys.router), *self._fleet.router.args]
        container["args"] = self._values.value("arguments.router", arguments)
        container["ports"] = [{"name": "http", "containerPort": HTTP_PORT}]
        container |= {
            # Startup: it listens. Readiness: an instance answers. Liveness: its process answers.
            "startupProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 1, "failureThreshold": 60},
            "readinessProbe": _http("/health", period_s=2, failures=2),
            "livenessProbe": _http("/kvferry/challenge?nonce=alive", period_s=10, failures=6),
            # Clients connect until its address is removed from the Service's endpoints.
            "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        }
        template = self._template("router", container, unit)
        template["spec"]["terminationGracePeriodSeconds"] = self._drain_s + self.margin_s
        return template

    def controller(self, name: str, routers: Sequence[str]) -> Object:
        """The template of the controller's pods, which decides the counts of a fleet with `[scale]`. `name`: name of
        the ConfigMap with the fleet's file, and of the account that may scale its workloads."""
        assert self._fleet.scale is not None
        container = self._container("controller")
        patch = [] if self._fleet.scale.recommend else ["--patch-replicas"]
        command = ["kvferry", "fleet", "recommend", f"{_SPEC_FOLDER}/{SPEC_FILE}", *patch]
        container["command"] = [*command, *(f"--router={url}" for url in routers)]
        container["volumeMounts"].append({"name": "spec", "mountPath": _SPEC_FOLDER, "readOnly": True})
        container["env"].append({"name": STATE_DIR, "value": _STATE_FOLDER})
        # It does not listen, but writes to the lock file of its ledger periodically.
        lock = f"{_STATE_FOLDER}/fleets/recommended/{self._fleet.name}/controller.lock"
        minutes = f"-mmin -{self.lock_age_s // 60}"
        container["livenessProbe"] = {
            "exec": {"command": ["/bin/sh", "-c", f'test -n "$(find {lock} {minutes})"']},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 4,
        }
        template = self._template("controller", container, None)
        template["spec"]["volumes"].append({"name": "spec", "configMap": {"name": name}})
        if patch:
            template["spec"] |= {"automountServiceAccountToken": True, "serviceAccountName": name}
        return template

    def _worker(self, role: Role, pod: InstancePod) -> list[str]:
        """The command of a further pod of an instance, which answers no requests."""
        if self._fleet.engine.kind == "kvferry":
            return ["kvferry", "rank", f"{pod.leader}:{RANKS_PORT}"]
        return _vllm_worker(self._fleet, role, pod)

    def _arguments(self, role: Role, pod: InstancePod) -> list[str]:
        engine, role_spec = self._fleet.engine, self._fleet.role.get(role)
        arguments = [
            "--host=$(POD_IP)",
            f"--port={HTTP_PORT}",
            f"--grace-s={self.grace_s}",
            f"--kv-transfer-config={transfer_config(engine.connectors, role)}",
        ]
        ranks, role_arguments = (role_spec.tensor_parallel_size, role_spec.args) if role_spec is not None else (1, ())
        if engine.kind == "kvferry":
            arguments += [f"--tensor-parallel-size={ranks}"] if ranks > 1 else []
            arguments += [f"--ranks-at=$(POD_IP):{RANKS_PORT}"] if pod_of(self._fleet, role).hosts > 1 else []
            if (target_s := self._fleet.itl_target_s) is not None:
                arguments.append(f"--itl-target-s={target_s:g}")
            keys = self._fleet.keys
            tables = (to_flags(keys.engine), engine.args, to_flags(keys.role.get(role, {})), role_arguments)
            return reduce(overridden, tables, arguments)
        python = [f"--engine-python={engine.python}"] if engine.python else []
        return [*arguments, "--engine=vllm", *python, "--", *_vllm_arguments(self._fleet, role, pod)]

    def _instance_probes(self) -> Object:
        """Probes. Startup: it has loaded its model. Readiness: it serves. Liveness: its process answers."""
        start_s = int(seconds(self._fleet.failure.start))
        return {
            "startupProbe": _http("/health", period_s=5, failures=max(1, start_s // 5)),
            "readinessProbe": _http("/health", period_s=2, failures=3),
            "livenessProbe": _http("/version", period_s=10, failures=6),
        }

    def _drain_hook(self, routers: Sequence[str]) -> Object:
        """A hook that drains an instance before it gets SIGTERM: its routers send it no more requests, and wait until
        it has no outstanding ticket."""
        commands = " ".join(
            f'kvferry fleet drain "http://$POD_IP:{HTTP_PORT}" --router {router} --wait-s {self._drain_s} &'
            for router in routers
        )
        return {"lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", f"{commands} wait"]}}}}

    def _container(self, role: PodRole) -> Object:
        pod, kubernetes, values = pod_of(self._fleet, role), self._kubernetes, self._values
        capabilities: Object = {"drop": ["ALL"]}
        if any("rdma" in name for name in pod.limits):
            capabilities["add"] = ["IPC_LOCK"]  # RDMA registers memory, which must not be swapped or moved
        resources = {"requests": dict(pod.requests), "limits": dict(pod.limits)}
        token = {"secretKeyRef": {"name": token_secret(self._fleet), "key": "token"}}
        variables = {"HOME": "/cache", "HF_HOME": "/models", **kubernetes.environment}
        if role == "controller":  # the controller takes no settings of its fleet from its environment
            variables = {name: value for name, value in variables.items() if name not in flag_variables()}
        secrets = {name: reference.partition("/") for name, reference in sorted(pod.secrets.items())}
        return {
            "name": "kvferry",
            "image": values.value("image", kubernetes.image),
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": AUTH_TOKEN, "valueFrom": token},
                *({"name": name, "value": value} for name, value in variables.items() if name not in secrets),
                *(
                    {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
                    for name, (secret, _, key) in secrets.items()
                ),
            ],
            "resources": values.value(
                f"pod.{role}.resources", {key: amount for key, amount in resources.items() if amount}
            ),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": capabilities,
            },
            "volumeMounts": [
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "cache", "mountPath": "/cache"},
                {"name": "models", "mountPath": "/models"},
            ],
        }

    def _template(self, role: PodRole, container: Object, unit: int | None) -> Object:
        pod, kubernetes, values = pod_of(self._fleet, role), self._kubernetes, self._values
        claim = kubernetes.model_claim
        size = values.value(f"pod.{role}.sharedMemory", pod.shared_memory)
        spec: Object = {
            "automountServiceAccountToken": False,
            # Kubernetes would set KVFERRY_PORT and the like beside a Service named kvferry, which are flags here.
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "nodeSelector": values.value(f"pod.{role}.nodeSelector", dict(pod.node_selector)),
            "tolerations": values.value(
                f"pod.{role}.tolerations", [msgspec.to_builtins(toleration) for toleration in pod.tolerations]
            ),
            "containers": [container],
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "cache", "emptyDir": {}},
                {"name": "models", "persistentVolumeClaim": {"claimName": claim}} if claim else
                {"name": "models", "emptyDir": {}},
            ],
        }  # fmt: skip
        if kubernetes.service_account is not None:
            spec["serviceAccountName"] = kubernetes.service_account
        if kubernetes.image_pull_secrets:
            spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
        return {"metadata": {"labels": labels_of(self._fleet, role, unit)}, "spec": spec}

    def _placed(self, template: Object, unit: int | None) -> Object:
        """The template, with affinities that place the members of one unit together or on different nodes, as its
        `place` says."""
        if unit is None or self._fleet.unit is None:
            return template
        term: Object = {"labelSelector": {"matchLabels": labels_of(self._fleet, unit=unit)}}
        same_host, same_zone = {**term, "topologyKey": "kubernetes.io/hostname"}, {
            **term, "topologyKey": "topology.kubernetes.io/zone",
        }  # fmt: skip
        preferred = "preferredDuringSchedulingIgnoredDuringExecution"
        template["spec"]["affinity"] = {
            "same-host": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same_host]}},
            "pack": {"podAffinity": {preferred: [{"weight": 100, "podAffinityTerm": same_zone}]}},
            "spread": {"podAntiAffinity": {preferred: [{"weight": 100, "podAffinityTerm": same_host}]}},
        }[self._fleet.unit.place]
        return template

    def _in_group(self, template: Object, group: str) -> Object:
        gang = self._kubernetes.gang
        if gang == "kubernetes":
            template["spec"]["schedulingGroup"] = {"podGroupName": group}
        elif gang == "volcano":
            template["spec"]["schedulerName"] = "volcano"
            template["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": group}
        return template


def token_secret(fleet: DesiredFleet) -> str:
    """The name of the Secret with the deployment's token."""
    return kubernetes_of(fleet).token_secret or f"{fleet.name}-token"


def transfer_config(connectors: Sequence[str], role: Role) -> str:
    """`--kv-transfer-config` of an instance in a pod, which is reached at the pod's address."""
    endpoint: Mapping[str, Any] = {"kv_ip": "$(POD_IP)", "kv_port": KV_PORT}
    both_roles = {"kv_role": "kv_both"} if role == "both" else {}
    if len(connectors) == 1:
        config = {"kv_connector": connectors[0], **both_roles, **endpoint}
    else:
        children = [{"kv_connector": name} for name in connectors]
        extra = {"kv_connector_extra_config": {"connectors": children}}
        config = {"kv_connector": "MultiConnector", **both_roles, **endpoint, **extra}
    return msgspec.json.encode(config).decode()


def _vllm_arguments(fleet: DesiredFleet, role: Role, pod: InstancePod) -> list[str]:
    role_spec, hosts = fleet.role.get(role), pod_of(fleet, role).hosts
    arguments = list(fleet.engine.args)
    if role_spec is not None:
        arguments += [f"--tensor-parallel-size={role_spec.tensor_parallel_size}", *role_spec.args]
    if hosts > 1:
        arguments += [f"--nnodes={hosts}", f"--node-rank={pod.index}", f"--master-addr={pod.leader}"]
    return arguments


def _vllm_worker(fleet: DesiredFleet, role: Role, pod: InstancePod) -> list[str]:
    """vLLM's own command for further ranks of an instance."""
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}[role]
    transfer = msgspec.json.decode(transfer_config(fleet.engine.connectors, role)) | {"kv_role": kv_role}
    python = fleet.engine.python or "python3"
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", fleet.model, "--headless"]
    command.append(f"--kv-transfer-config={msgspec.json.encode(transfer).decode()}")
    return [*command, *_vllm_arguments(fleet, role, pod)]


def _http(path: str, *, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
