"""A fleet as objects of Kubernetes: valid by the schemas of those who will read them, and the same in a chart."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from referencing import Registry, Resource

from kvferry.cli.main import main
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.manifests.autoscaling import NOT_SCALED, Autoscaling, chosen
from kvferry.fleet.backends.kubernetes.manifests.chart import write_chart
from kvferry.fleet.backends.kubernetes.manifests.render import render, render_controller
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.control.desired_counts import rules_of
from kvferry.fleet.control.recommender import read_recommended
from kvferry.fleet.spec.fleet_spec import fleet_from

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSION = "1.37"
SCHEMAS = Path(__file__).parent / "schemas"
OBJECTS = dict[str, Any]

FULL: OBJECTS = {
    "image": "registry.example/kvferry:0.1",
    "namespace": "llm",
    "pod_monitor": True,
    "clients_from": {"app": "chat"},
    "model_claim": "models",
    "service_account": "kvferry",
    "image_pull_secrets": ["registry"],
    "environment": {"NCCL_DEBUG": "INFO"},
    "pod": {
        "prefill": {
            "requests": {"cpu": "8", "memory": "64Gi"},
            "limits": {"nvidia.com/gpu": "1", "rdma/hca": "1"},
            "node_selector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
        "router": {"requests": {"cpu": "500m"}, "secrets": {"KVFERRY_API_KEY": "chat-keys/api"}},
    },
}


def pooling(engine: OBJECTS | None = None, roles: OBJECTS | None = None, **kubernetes: Any) -> OBJECTS:
    return {
        "name": "chat",
        "model": "Qwen/Qwen3-8B",
        "mode": "pooling",
        "engine": engine or {},
        "role": roles or {"prefill": {"count": 2}, "decode": {"count": 3, "args": ["--max-num-seqs=64"]}},
        "backend": {"kind": "kubernetes", "kubernetes": {"image": "kvferry:0.1", **kubernetes}},
    }


def in_units(place: str = "same-host", **kubernetes: Any) -> OBJECTS:
    told = {**pooling(**kubernetes), "mode": "replica", "role": {}}
    return {**told, "unit": {"members": {"prefill": 1, "decode": 2}, "count": 2, "place": place}}


WIDE = {"prefill": {"count": 1, "tensor_parallel_size": 8}, "decode": {"count": 2, "tensor_parallel_size": 16}}
ON_HOSTS = {"pod": {"decode": {"hosts": 2, "limits": {"nvidia.com/gpu": "8"}}}}
VLLM = {"kind": "vllm", "connector": ["P2pConnector", "KVStoreConnector"], "args": ["--dtype=bfloat16"]}

CASES: dict[str, OBJECTS] = {
    "plain": pooling(),
    "full": pooling(**FULL),
    "one role": pooling(roles={"both": {"count": 2}}),
    "vllm": pooling(VLLM),
    "ranks on several pods": pooling(VLLM, WIDE, **ON_HOSTS),
    "ranks of kvferry's own on several pods": pooling(None, WIDE, pod={"prefill": {"hosts": 8}}),
    "gang": pooling(VLLM, WIDE, **ON_HOSTS, gang="kubernetes"),
    "gang of Volcano's": pooling(VLLM, WIDE, **ON_HOSTS, gang="volcano"),
    "disaggregated set": pooling(disaggregated_set=True),
    "disaggregated set on several pods": pooling(VLLM, WIDE, **ON_HOSTS, disaggregated_set=True),
    "token of one's own": pooling(token_secret="mine"),
    "units": in_units(),
    "units apart": in_units("spread", gang="kubernetes"),
    "units packed": in_units("pack", gang="volcano"),
}

SCALE = {"ttft": "2s", "itl": "50ms", "cool_down": "30s"}


def scaled(
    roles: OBJECTS | None = None, scale: OBJECTS | None = None, engine: OBJECTS | None = None, **kubernetes: Any
) -> OBJECTS:
    roles = roles or {"prefill": {"count": 2, "min": 2, "max": 12}, "decode": {"count": 3, "max": 4}}
    told = pooling(engine, roles, **kubernetes)
    return {**told, "scale": {**SCALE, **(scale or {})}}


HPA, KEDA = Autoscaling("hpa"), Autoscaling("keda", "http://prometheus.monitoring:9090")
KEDA_ALONE = Autoscaling("keda")
NO_MINIMUM = {"prefill": {"min": 0, "max": 3}, "decode": {"min": 0, "max": 3}}
WIDE_SCALED = {role: {**one, "max": 6} for role, one in WIDE.items()}
SCALED: dict[str, tuple[OBJECTS, Autoscaling]] = {
    "recommended only": (scaled(scale={"recommend": True}), NOT_SCALED),
    "HPA": (scaled(), HPA),
    "HPA of one role": (scaled({"both": {"max": 3}}), HPA),
    "HPA and a gang on several pods": (scaled(WIDE_SCALED, None, VLLM, **ON_HOSTS, gang="kubernetes"), HPA),
    "HPA within a budget": (scaled({"prefill": {}, "decode": {}}, {"budget": 8, "most_per_decode": 2.0}), HPA),
    "KEDA": (scaled(pod_monitor=True, namespace="llm"), KEDA),
    "KEDA down to nothing": (scaled(NO_MINIMUM, {"idle": "10m"}), KEDA),
    "KEDA without Prometheus": (scaled(namespace="llm"), KEDA_ALONE),
}
CASES |= {name: told for name, (told, _) in SCALED.items()}
ROLE_CHANGES = {"prefill": {"can_be": ["decode"], "max": 3}, "decode": {"min": 1, "max": 4}}
CONTROLLED: dict[str, OBJECTS] = {
    "controller": pooling(**FULL),
    "controller that scales": scaled(ROLE_CHANGES, engine=VLLM, controllers=2, context="mine"),
    "controller of units": {**in_units(), "failure": {"restart": "unit"}},
    "controller of several pods": pooling(VLLM, WIDE, **ON_HOSTS),
    "controller with a Secret of one's own": pooling(token_secret="mine", service_account="plain"),
}
CASES |= CONTROLLED


def rendered(told: OBJECTS, autoscaling: Autoscaling = NOT_SCALED) -> list[OBJECTS]:
    return render(fleet_from(told), Values(), "the token of a test", autoscaling)


def renders(case: str) -> Callable[[Values, str], list[OBJECTS]]:
    """What gives the objects of a case, for values and a token."""
    fleet = fleet_from(CASES[case])
    if case in CONTROLLED:
        return lambda values, token: render_controller(fleet, values, token)
    autoscaling = SCALED[case][1] if case in SCALED else NOT_SCALED
    return lambda values, token: render(fleet, values, token, autoscaling)


def of_case(case: str) -> list[OBJECTS]:
    return renders(case)(Values(), "the token of a test")


def of_kind(objects: list[OBJECTS], kind: str) -> dict[str, OBJECTS]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def contents(name: str) -> OBJECTS:
    """A file of Kubernetes' own schemas."""
    path = f"kubernetes-json-schema/v{VERSION}.0-local-strict/{name}.json"
    found: OBJECTS = kubernetes_validate.utils.schema_contents(path, VERSION)
    return found


@cache
def definitions() -> Any:
    """What all schemas refer to."""
    return Resource.from_contents(contents("_definitions")) @ Registry()


@cache
def validator(version: str, kind: str) -> jsonschema.Draft202012Validator:
    path = SCHEMAS / f"{version.replace('/', '_')}_{kind}.json"
    if path.exists():
        schema = json.loads(path.read_text())
    else:
        schema = contents(f"{kind.lower()}-{re.sub('[.][^/]*/|/', '-', version)}")
    return jsonschema.Draft202012Validator(schema, registry=definitions())


def validate(one: OBJECTS) -> None:
    """Raises for what whoever reads an object would not take: a field that is unknown, of another type or missing."""
    validator(one["apiVersion"], one["kind"]).validate(one)


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(case: str) -> None:
    objects = of_case(case)
    for one in objects:
        validate(one)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.replicas", "three"),
        ("Deployment", "spec.template.spec.containers.0.imag", "x"),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.size", "two"),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.imag", "x"),
        ("DisaggregatedSet", "spec.rolls", []),
        ("PodMonitor", "spec.podMetricsEndpoints.0.prot", "http"),
        ("PodGroup", "spec.minMembers", 1),
        ("HorizontalPodAutoscaler", "spec.metrics.0.external.target.averagevalue", "1"),
        ("ScaledObject", "spec.maxReplicas", 3),
        ("ScaledObject", "spec.triggers.0.metadata.threshold", 1),
    ],
)
def test_the_schemas_refuse_what_is_wrong(kind: str, path: str, value: Any) -> None:
    found = copy.deepcopy([one for case in CASES for one in of_case(case) if one["kind"] == kind])
    *way, last = path.split(".")
    place: Any = found[0]
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(found[0])


@pytest.mark.parametrize("case", CASES)
def test_a_chart_with_its_values_is_the_manifests(case: str, tmp_path: Path) -> None:
    """Helm itself is not here: its four expressions that a chart uses are filled in as it does."""
    fleet = fleet_from(CASES[case])
    write_chart(fleet, tmp_path, lambda values: renders(case)(values, ""))
    values = {**yaml.safe_load((tmp_path / "values.yaml").read_text()), "token": "the token of a test"}
    assert yaml.safe_load((tmp_path / "Chart.yaml").read_text())["name"] == "chat"

    def fill(found: re.Match[str]) -> str:
        expression = re.fullmatch(
            r'(toJson )?\.(Values\.[\w.]+|Release\.Namespace)|required "set token" \.(Values\.token) \| toJson',
            found[1],
        )
        assert expression is not None, found[1]
        place: Any = {"Values": values, "Release": {"Namespace": fleet.backend.kubernetes.namespace}}  # type: ignore[union-attr]
        for step in (expression[2] or expression[3]).split("."):
            place = place[step]
        return json.dumps(place) if expression[1] or expression[3] else str(place)

    text = re.sub(r"\{\{ (.+?) \}\}", fill, (tmp_path / "templates/fleet.yaml").read_text())
    assert list(yaml.safe_load_all(text)) == of_case(case)


def test_pods_may_do_nothing_that_they_need_not() -> None:
    for case in CASES:
        for pod in pods(of_case(case)):
            (container,) = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            is_controller = container["command"][1:3] == ["fleet", "run"]
            assert pod["automountServiceAccountToken"] is is_controller
            assert not pod["enableServiceLinks"]
            written = {one["mountPath"] for one in container["volumeMounts"]}
            read_only = {one["mountPath"] for one in container["volumeMounts"] if one.get("readOnly")}
            assert written - read_only == {"/dev/shm", "/tmp", "/cache", "/models"}


def pods(objects: list[OBJECTS]) -> list[OBJECTS]:
    """The spec of every pod template in them, wherever it is."""
    found = []
    for one in objects:
        stack: list[Any] = [one]
        while stack:
            place = stack.pop()
            if isinstance(place, dict):
                if "containers" in place:
                    found.append(place)
                stack += place.values()
            elif isinstance(place, list):
                stack += place
    return found


def test_an_instance_registers_at_every_router_and_leaves_drained() -> None:
    objects = rendered({**pooling(), "failure": {"drain": "90s"}})
    routers = [f"http://chat-router-{number}.chat-routers:8000" for number in (0, 1)]
    assert of_kind(objects, "StatefulSet")["chat-router"]["spec"]["replicas"] == len(routers)
    pod = of_kind(objects, "Deployment")["chat-decode"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "KVFERRY_REGISTER", "value": ",".join(routers)} in container["env"]
    (script,) = container["lifecycle"]["preStop"]["exec"]["command"][2:]
    assert all(f"--router {one} --wait-s 90" in script for one in routers)
    assert pod["terminationGracePeriodSeconds"] > 90
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"/health", "/version"}


def variables(objects: list[OBJECTS], kind: str, name: str) -> OBJECTS:
    (container,) = of_kind(objects, kind)[name]["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one for one in container["env"]}


def test_a_key_is_a_secret_of_the_pods_that_need_it() -> None:
    told = pooling(**{**FULL, "environment": {"NCCL_DEBUG": "INFO", "KVFERRY_MAX_NUM_SEQS": "8"}})
    objects = rendered(told)
    secret = {"secretKeyRef": {"name": "chat-keys", "key": "api"}}
    assert variables(objects, "StatefulSet", "chat-router")["KVFERRY_API_KEY"]["valueFrom"] == secret
    assert "KVFERRY_API_KEY" not in variables(objects, "Deployment", "chat-decode")


def test_a_controller_gets_no_settings_of_its_fleet_from_its_environment() -> None:
    """`kvferry fleet run` would refuse them."""
    objects = rendered(scaled(environment={"NCCL_DEBUG": "INFO", "KVFERRY_MAX_NUM_SEQS": "8"}), HPA)
    found = variables(objects, "Deployment", "chat-controller")
    assert "NCCL_DEBUG" in found
    assert "KVFERRY_MAX_NUM_SEQS" not in found


@pytest.mark.parametrize("monitored", [True, False])
def test_prometheus_reaches_routers_that_only_some_clients_may(monitored: bool) -> None:
    told = pooling(clients_from={"app": "chat"}, pod_monitor=monitored)
    rules = of_kind(rendered(told), "NetworkPolicy")["chat-router"]["spec"]["ingress"]
    labels = [one["podSelector"].get("matchLabels") for rule in rules for one in rule["from"]]
    assert {"app": "chat"} in labels
    assert ({"app.kubernetes.io/name": "prometheus"} in labels) is monitored


def test_rdma_needs_memory_that_stays() -> None:
    objects = of_kind(rendered(pooling(**FULL)), "Deployment")
    added = {
        name: one["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"].get("add")
        for name, one in objects.items()
    }
    assert added == {"chat-prefill": ["IPC_LOCK"], "chat-decode": None}


def test_ranks_on_several_pods_find_each_other() -> None:
    (found,) = of_kind(rendered(CASES["ranks on several pods"]), "LeaderWorkerSet").values()
    pods_of = found["spec"]["leaderWorkerTemplate"]
    leader, worker = (pods_of[f"{name}Template"]["spec"]["containers"][0] for name in ("leader", "worker"))
    assert pods_of["size"] == 2
    assert {"--nnodes=2", "--node-rank=0", "--master-addr=$(LWS_LEADER_ADDRESS)"} <= {*leader["args"]}
    assert {"--headless", "--node-rank=$(LWS_WORKER_INDEX)", "--tensor-parallel-size=16"} <= {*worker["command"]}
    assert "lifecycle" not in worker


def test_ranks_of_kvferry_s_own_on_several_pods_find_each_other() -> None:
    objects = of_case("ranks of kvferry's own on several pods")
    (found,) = of_kind(objects, "LeaderWorkerSet").values()
    pods_of = found["spec"]["leaderWorkerTemplate"]
    leader, worker = (pods_of[f"{name}Template"]["spec"]["containers"][0] for name in ("leader", "worker"))
    assert pods_of["size"] == 8
    assert {"--tensor-parallel-size=8", "--ranks-at=$(POD_IP):7000"} <= {*leader["args"]}
    assert worker["command"] == ["kvferry", "rank", "$(LWS_LEADER_ADDRESS):7000"]


def test_flags_of_routers_are_theirs() -> None:
    objects = rendered({**pooling(), "router": {"args": ["--policy=round_robin"]}})
    (router,) = of_kind(objects, "StatefulSet")["chat-router"]["spec"]["template"]["spec"]["containers"]
    assert router["args"][-1] == "--policy=round_robin"


def test_the_members_of_a_unit_stay_among_themselves() -> None:
    objects = rendered(CASES["units"])
    first = of_kind(objects, "Deployment")["chat-0-prefill"]["spec"]["template"]
    told = {one["name"]: one.get("value") for one in first["spec"]["containers"][0]["env"]}
    assert told["KVFERRY_REGISTER"].startswith("http://chat-0-router-0.chat-0-routers:8000,")
    (term,) = first["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= first["metadata"]["labels"].items()
    clients = of_kind(objects, "Service")["chat"]["spec"]["selector"]
    routers = [one["spec"]["template"]["metadata"]["labels"] for one in of_kind(objects, "StatefulSet").values()]
    assert len(routers) == 2
    assert all(clients.items() <= one.items() for one in routers)


@pytest.mark.parametrize("case", CONTROLLED)
def test_a_controller_is_told_the_whole_spec(case: str) -> None:
    fleet, objects = fleet_from(CASES[case]), of_case(case)
    text = of_kind(objects, "ConfigMap")["chat-controller"]["data"]["fleet.toml"]
    told = fleet_from(tomllib.loads(text))
    assert fleet.backend.kubernetes is not None
    here = msgspec.structs.replace(fleet.backend.kubernetes, context=None)
    assert told == msgspec.structs.replace(fleet, backend=msgspec.structs.replace(fleet.backend, kubernetes=here))
    (deployment,) = of_kind(objects, "Deployment").values()
    assert deployment["spec"]["replicas"] == here.controllers
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "chat-controller"
    assert not of_kind(objects, "StatefulSet")


def test_a_controller_may_change_what_is_its_own_fleet_s() -> None:
    """But for pods, which have no names before they are made."""
    for case in CONTROLLED:
        objects = of_case(case)
        (binding,) = of_kind(objects, "RoleBinding").values()
        (subject,) = binding["subjects"]
        assert {"Role": [binding["roleRef"]["name"]], "ServiceAccount": [subject["name"]]} == {
            kind: [*of_kind(objects, kind)] for kind in ("Role", "ServiceAccount")
        }
        there = {(one["kind"].lower() + "s", one["metadata"]["name"]) for one in objects}
        for rule in of_kind(objects, "Role")["chat-controller"]["rules"]:
            (resource,) = rule["resources"]
            assert "*" not in rule["verbs"]
            assert resource == "pods" or {(resource, name) for name in rule["resourceNames"]} <= there


@pytest.mark.parametrize("case", SCALED)
def test_who_recommends_is_told_what_the_spec_says(case: str, tmp_path: Path) -> None:
    fleet, objects = fleet_from(CASES[case]), of_case(case)
    path = tmp_path / "fleet.toml"
    path.write_text(of_kind(objects, "ConfigMap")["chat-controller"]["data"]["fleet.toml"])
    told = read_recommended(path)
    assert told.scale == fleet.scale
    assert told.scale is not None
    assert rules_of(told, told.scale).most == rules_of(fleet, told.scale).most
    pod = of_kind(objects, "Deployment")["chat-controller"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == [
        *("kvferry", "fleet", "recommend", "/spec/fleet.toml"),
        *(f"--router=http://chat-router-{number}.chat-routers:8000" for number in (0, 1)),
    ]


@pytest.mark.parametrize("case", SCALED)
def test_counts_are_an_autoscaler_s_or_the_manifest_s(case: str) -> None:
    """A number in a manifest would undo what the autoscaler did, whenever that is applied."""
    objects = of_case(case)
    scalers = {**of_kind(objects, "HorizontalPodAutoscaler"), **of_kind(objects, "ScaledObject")}
    workloads = {**of_kind(objects, "Deployment"), **of_kind(objects, "LeaderWorkerSet")}
    del workloads["chat-controller"]
    assert scalers.keys() == (set() if SCALED[case][1] is NOT_SCALED else workloads.keys())
    for name, one in workloads.items():
        assert ("replicas" in one["spec"]) is (name not in scalers)
        if name in scalers:
            target = scalers[name]["spec"]["scaleTargetRef"]
            assert target == {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": name}


def test_an_autoscaler_asks_for_its_own_role_of_its_own_fleet() -> None:
    hpa = of_kind(of_case("HPA"), "HorizontalPodAutoscaler")["chat-prefill"]["spec"]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (2, 12)
    assert hpa["behavior"]["scaleDown"]["tolerance"] == "0", "or 11 of 12 would be enough"
    (metric,) = hpa["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"] == {
        "app_kubernetes_io_instance": "chat",
        "role": "prefill",
    }
    objects = of_case("KEDA")
    (trigger,) = of_kind(objects, "ScaledObject")["chat-decode"]["spec"]["triggers"]
    labels = 'namespace="llm",app_kubernetes_io_instance="chat",role="decode"'
    assert trigger["metadata"]["query"] == f"max(kvferry_fleet_desired_instances{{{labels}}})"
    assert of_kind(objects, "PodMonitor")["chat"]["spec"]["podTargetLabels"] == ["app.kubernetes.io/instance"]
    (trigger,) = of_kind(of_case("KEDA without Prometheus"), "ScaledObject")["chat-decode"]["spec"]["triggers"]
    assert trigger["metadata"]["url"] == "http://chat.llm:8000/kvferry/plan"
    assert trigger["metadata"]["valueLocation"] == "desired.decode"
    down = of_kind(of_case("KEDA down to nothing"), "ScaledObject")["chat-decode"]["spec"]
    assert (down["minReplicaCount"], down["maxReplicaCount"]) == (0, 3)


@pytest.mark.parametrize(
    ("told", "asked", "found"),
    [
        (pooling(), None, "none"),
        (scaled(), None, "hpa"),
        (scaled(), "none", "none"),
        (scaled(NO_MINIMUM, {"idle": "10m"}), "keda", "keda"),
        (scaled(scale={"recommend": True}), None, "none"),
        (pooling(), "hpa", "no such table"),
        (scaled(scale={"recommend": True}), "keda", "only said"),
        (scaled(NO_MINIMUM, {"idle": "10m"}), "hpa", "scale.idle"),
        (scaled(NO_MINIMUM, {"idle": "10m"}), None, "scale.idle"),
        (scaled(NO_MINIMUM, {"aggregate": True}), "hpa", "scale.aggregate"),
        ({**scaled(), "router": {"args": ["--api-key-file=/keys"]}}, "keda", "--api-key-file, routers show"),
        (scaled(pod={"router": {"secrets": {"KVFERRY_ADMIN_KEY": "k/admin"}}}), "keda", "--admin-key, routers show"),
        (scaled(disaggregated_set=True), "hpa", "DisaggregatedSet"),
    ],
)
def test_which_autoscaler(told: OBJECTS, asked: Any, found: str) -> None:
    if found in ("hpa", "keda", "none"):
        assert chosen(fleet_from(told), asked) == found
    else:
        with pytest.raises(ConfigError, match=f"--autoscaler {asked or 'hpa'}: .*{found}"):
            chosen(fleet_from(told), asked)


def test_units_are_not_counted_by_an_autoscaler() -> None:
    told = {**in_units(), "scale": SCALE}
    told["unit"]["max"] = 3
    assert not of_kind(rendered(told), "ConfigMap")
    with pytest.raises(ConfigError, match="units are objects of their own"):
        chosen(fleet_from(told), "hpa")


@pytest.mark.parametrize(
    ("kubernetes", "complaint"),
    [
        ({"environment": {"KVFERRY_AUTH_TOKEN": "a secret of ours"}}, "token_secret"),
        ({"environment": {"A B": ""}}, "no name of an environment variable"),
        ({"environment": {"KVFERRY_API_KEY": "a secret of ours"}}, "put it into a Secret"),
        ({"pod": {"router": {"secrets": {"KVFERRY_AUTH_TOKEN": "keys/token"}}}}, "token_secret"),
        ({"pod": {"router": {"secrets": {"KVFERRY_API_KEY": "no-key-of-it"}}}}, "pod.router.secrets"),
        ({"namespace": "a.b"}, "63 lower-case letters"),
        ({"namespace": "a" * 64}, "63 lower-case letters"),
        ({"namespace": "llm\n"}, "63 lower-case letters"),
        ({"token_secret": "mine\n"}, "the name of an object"),
        ({"pod": {"router": {"limits": {"cpu": "1\n"}}}}, "pod.router.limits"),
    ],
)
def test_names_that_kubernetes_would_not_take(kubernetes: OBJECTS, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        fleet_from(pooling(**kubernetes))
    assert "a secret of ours" not in str(refused.value)


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ({**pooling(), "name": "7b"}, "must begin with a letter"),
        (pooling(pod={"controller": {"hosts": 2}}), "only instances"),
        (pooling(VLLM, pod={"router": {"hosts": 2}}), "only instances"),
        (pooling(pod={"decode": {"hosts": 2}}), "must be a multiple"),
        (pooling(None, WIDE, pod={"prefill": {"hosts": 4}}), "each rank has a pod of its own"),
        (pooling(VLLM, pod={"decode": {"hosts": 2}}), "must be a multiple"),
        (in_units(disaggregated_set=True), "disaggregated_set is for"),
        (pooling(roles={"both": {}}, disaggregated_set=True), "two roles or more"),
        ({**pooling(), "backend": {"kind": "local"}}, "no table"),
        ({**pooling(), "args": ["--log-format=json"]}, "args is not for pods"),
        (pooling({"kv_transfer_config": "{}"}), "engine.kv_transfer_config is not for pods"),
    ],
)
def test_what_pods_cannot_do_is_refused(told: OBJECTS, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        render(fleet_from(told), Values())


SPEC = """
name = "chat"
model = "kvferry/tiny-python"
mode = "pooling"
[role.prefill]
[role.decode]
[backend]
kind = "kubernetes"
kubernetes = {image = "kvferry:0.1"}
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "chat.toml"
    spec.write_text(SPEC)
    monkeypatch.delenv("KVFERRY_AUTH_TOKEN", raising=False)
    assert main(["fleet", "render", str(spec)]) == 0
    said = capsys.readouterr()
    assert "kubectl -n default create secret generic chat-token" in said.err
    assert not of_kind(list(yaml.safe_load_all(said.out)), "Secret")
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "0123456789abcdef")
    assert main(["fleet", "render", str(spec)]) == 0
    (secret,) = of_kind(list(yaml.safe_load_all(capsys.readouterr().out)), "Secret").values()
    assert secret["stringData"] == {"token": "0123456789abcdef"}
    assert main(["fleet", "render", str(spec), "--chart", str(tmp_path / "chart")]) == 0
    assert "0123456789abcdef" not in "".join(one.read_text() for one in (tmp_path / "chart").rglob("*.yaml"))
    assert main(["fleet", "render", str(tmp_path / "no.toml")]) == 2


def test_the_command_with_a_controller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "chat.toml"
    spec.write_text(SPEC)
    asked = ["fleet", "render", str(spec)]

    def deployments(*more: str) -> tuple[set[str], str]:
        assert main([*asked, *more]) == 0
        said = capsys.readouterr()
        return {*of_kind(list(yaml.safe_load_all(said.out)), "Deployment")}, said.err

    plain = {"chat-prefill", "chat-decode"}
    assert deployments()[0] == plain
    assert deployments("--controller", "kvferry")[0] == {"chat-controller"}
    spec.write_text(SPEC.replace("[role.prefill]", '[role.prefill]\ncan_be = ["decode"]'))
    assert deployments()[0] == {"chat-controller"}
    assert deployments("--controller", "kubernetes")[0] == plain
    spec.write_text(spec.read_text().replace('"kvferry:0.1"', '"kvferry:0.1", gang = "volcano"'))
    found, said = deployments()
    assert found == plain
    assert "in spite of role.prefill.can_be" in said
    assert main([*asked, "--controller", "kvferry"]) == 2
    assert main([*asked, "--controller", "kvferry", "--autoscaler", "hpa"]) == 2


def test_the_command_with_an_autoscaler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "chat.toml"
    spec.write_text(re.sub(r"(\[role.*\])", "\\1\nmax = 3", SPEC))
    asked = ["fleet", "render", str(spec)]
    assert main([*asked, "--autoscaler", "keda"]) == 2
    assert "there is no such table" in capsys.readouterr().err
    spec.write_text(spec.read_text() + '[scale]\nttft = "2s"\nitl = "50ms"\n')
    assert main([*asked, "--autoscaler", "hpa"]) == 0
    said = capsys.readouterr()
    assert {*of_kind(list(yaml.safe_load_all(said.out)), "HorizontalPodAutoscaler")} == {"chat-prefill", "chat-decode"}
    assert "pod_monitor = true" in said.err
    assert main(asked) == 0
    assert not of_kind(list(yaml.safe_load_all(capsys.readouterr().out)), "HorizontalPodAutoscaler")
    asked += ["--autoscaler", "keda"]
    assert main([*asked, "--prometheus", "http://user:secret@p"]) == 2
    assert main([*asked, "--chart", str(tmp_path / "chart")]) == 0
    values = yaml.safe_load((tmp_path / "chart/values.yaml").read_text())
    assert "prometheus" not in values
    assert main([*asked, "--prometheus", "http://prometheus:9090", "--chart", str(tmp_path / "chart")]) == 0
    values = yaml.safe_load((tmp_path / "chart/values.yaml").read_text())
    assert values["prometheus"] == "http://prometheus:9090"
    assert values["autoscaling"]["decode"] == {"min": 1, "max": 3}
