"""A fleet as objects of Kubernetes: valid by the schemas of those who will read them, and the same in a chart."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tomllib
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
from kvferry.fleet.backends.kubernetes.manifests.chart import write_chart
from kvferry.fleet.backends.kubernetes.manifests.render import render
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.control.recommender import read_recommended
from kvferry.fleet.spec.fleet_spec import fleet_from

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSION = "1.37"
HELM = Path(__file__).parents[5] / ".venv-helm" / "helm"
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
    "token of one's own": pooling(token_secret="mine"),
    "units": in_units(),
    "units apart": in_units("spread", gang="kubernetes"),
    "units packed": in_units("pack", gang="volcano"),
}

IN_UNITS_SCALED = {**in_units(), "unit": {"members": {"prefill": 1, "decode": 2}, "count": 2, "max": 3}}
SCALE = {"ttft": "2s", "itl": "50ms", "cool_down": "30s"}


def scaled(
    roles: OBJECTS | None = None, scale: OBJECTS | None = None, engine: OBJECTS | None = None, **kubernetes: Any
) -> OBJECTS:
    roles = roles or {"prefill": {"count": 2, "min": 2, "max": 12}, "decode": {"count": 3, "max": 4}}
    told = pooling(engine, roles, **kubernetes)
    return {**told, "scale": {**SCALE, **(scale or {})}}


@pytest.mark.parametrize(("arguments", "target"), [([], "0.05"), (["--itl-target-s=0.2"], "0.2")])
def test_pods_of_a_fleet_with_targets_bound_their_steps(arguments: list[str], target: str) -> None:
    found = pods(rendered(scaled(scale={"recommend": True}, engine={"args": arguments})))
    commands = [container.get("args", []) for pod in found for container in pod["containers"]]
    instances = [flags for flags in commands if "--kv-transfer-config" in str(flags)]
    targets = [[flag for flag in flags if "itl-target" in flag] for flags in instances]
    assert targets == [[f"--itl-target-s={target}"]] * len(instances) != []


NO_MINIMUM = {"prefill": {"min": 0, "max": 3}, "decode": {"min": 0, "max": 3}}
WIDE_SCALED = {role: {**one, "max": 6} for role, one in WIDE.items()}
SCALED: dict[str, OBJECTS] = {
    "recommended only": scaled(scale={"recommend": True}),
    "scaled": scaled(controllers=2, context="mine"),
    "scaled, of one role": scaled({"both": {"max": 3}}),
    "scaled, a gang on several pods": scaled(WIDE_SCALED, None, VLLM, **ON_HOSTS, gang="kubernetes"),
    "scaled within a budget": scaled({"prefill": {}, "decode": {}}, {"budget": 8, "most_per_decode": 2.0}),
    "scaled down to nothing": scaled(NO_MINIMUM, {"idle": "10m"}, pod_monitor=True, namespace="llm"),
}
CASES |= SCALED


def rendered(told: OBJECTS) -> list[OBJECTS]:
    return render(fleet_from(told), Values(), "the token of a test")


def of_case(case: str) -> list[OBJECTS]:
    return rendered(CASES[case])


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
        ("PodMonitor", "spec.podMetricsEndpoints.0.prot", "http"),
        ("PodGroup", "spec.minMembers", 1),
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
    """The four expressions that a chart uses are filled in as Helm does it; the next test has Helm itself."""
    fleet = fleet_from(CASES[case])
    write_chart(fleet, tmp_path, lambda values: render(fleet, values))
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


@pytest.mark.parametrize("case", CASES)
def test_helm_makes_the_manifests_of_a_chart(case: str, tmp_path: Path) -> None:
    if not HELM.is_file():
        pytest.skip("Helm is not installed; make install-helm has it")
    fleet = fleet_from(CASES[case])
    write_chart(fleet, tmp_path, lambda values: render(fleet, values))
    namespace = fleet.backend.kubernetes.namespace  # type: ignore[union-attr]
    flags = ("--namespace", namespace, "--set", "token=the token of a test", "--kube-version", f"{VERSION}.0")
    command = (str(HELM), "template", "chat", str(tmp_path), *flags)
    made = subprocess.run(command, capture_output=True, text=True, check=False, env={"HOME": str(tmp_path)})
    assert made.returncode == 0, made.stderr
    found = [each for each in yaml.safe_load_all(made.stdout) if each]
    assert sorted(found, key=identity) == sorted(of_case(case), key=identity)  # Helm has an order of its own
    refused = subprocess.run(command[:-4], capture_output=True, text=True, check=False, env={"HOME": str(tmp_path)})
    needs_token = "set token" in (tmp_path / "templates/fleet.yaml").read_text()
    assert ("set token" in refused.stderr) == needs_token


def identity(each: OBJECTS) -> str:
    """The kind and name of an object."""
    return f"{each['kind']} {each['metadata']['name']}"


def test_pods_may_do_nothing_that_they_need_not() -> None:
    for case in CASES:
        for pod in pods(of_case(case)):
            (container,) = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert pod["automountServiceAccountToken"] is ("--patch-replicas" in container["command"])
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
    objects = rendered(scaled(environment={"NCCL_DEBUG": "INFO", "KVFERRY_MAX_NUM_SEQS": "8"}))
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


@pytest.mark.parametrize("case", SCALED)
def test_a_controller_follows_the_whole_spec(case: str, tmp_path: Path) -> None:
    fleet, objects = fleet_from(CASES[case]), of_case(case)
    text = of_kind(objects, "ConfigMap")["chat-controller"]["data"]["fleet.toml"]
    assert fleet.backend.kubernetes is not None
    in_cluster = msgspec.structs.replace(fleet.backend.kubernetes, context=None)
    backend = msgspec.structs.replace(fleet.backend, kubernetes=in_cluster)
    assert fleet_from(tomllib.loads(text)) == msgspec.structs.replace(fleet, backend=backend)
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    assert read_recommended(path).scale == fleet.scale
    deployment = of_kind(objects, "Deployment")["chat-controller"]["spec"]
    is_scaled = case != "recommended only"
    assert deployment["replicas"] == in_cluster.controllers
    assert deployment["template"]["spec"]["containers"][0]["command"] == [
        *("kvferry", "fleet", "recommend", "/spec/fleet.toml"),
        *(["--patch-replicas"] if is_scaled else []),
        *(f"--router=http://chat-router-{number}.chat-routers:8000" for number in (0, 1)),
    ]
    assert (deployment["template"]["spec"].get("serviceAccountName") == "chat-controller") is is_scaled


@pytest.mark.parametrize("case", SCALED)
def test_a_controller_may_scale_its_own_fleet_and_nothing_else(case: str) -> None:
    objects = of_case(case)
    if case == "recommended only":
        assert not of_kind(objects, "Role")
        return
    (binding,) = of_kind(objects, "RoleBinding").values()
    (subject,) = binding["subjects"]
    assert {"Role": [binding["roleRef"]["name"]], "ServiceAccount": [subject["name"]]} == {
        kind: [*of_kind(objects, kind)] for kind in ("Role", "ServiceAccount")
    }
    existing = {(one["kind"].lower() + "s", one["metadata"]["name"]) for one in objects}
    workloads = {name for kind in ("Deployment", "LeaderWorkerSet") for name in of_kind(objects, kind)}
    scaled_names = set()
    for rule in of_kind(objects, "Role")["chat-controller"]["rules"]:
        (resource,) = rule["resources"]
        plural, _, subresource = resource.partition("/")
        assert {(plural, name) for name in rule["resourceNames"]} <= existing
        assert rule["verbs"] == (["patch"] if subresource else ["get", "patch"])
        scaled_names |= {*rule["resourceNames"]} if subresource == "scale" else set()
    assert scaled_names == workloads - {"chat-controller"}


@pytest.mark.parametrize("case", SCALED)
def test_counts_are_the_controller_s_or_the_manifest_s(case: str) -> None:
    """A number in a manifest would undo the controller's decision, whenever that is applied."""
    objects = of_case(case)
    workloads = {**of_kind(objects, "Deployment"), **of_kind(objects, "LeaderWorkerSet")}
    del workloads["chat-controller"]
    for one in workloads.values():
        assert ("replicas" in one["spec"]) is (case == "recommended only")


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
        (pooling(roles={"prefill": {"can_be": ["decode"]}, "decode": {}}), "role.prefill.can_be: a pod keeps"),
        ({**in_units(), "failure": {"restart": "unit"}}, "restarts the pod that failed"),
        ({**IN_UNITS_SCALED, "scale": SCALE}, "set unit.count"),
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


def test_the_command_writes_a_controller_for_a_fleet_that_is_scaled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "chat.toml"
    spec.write_text(re.sub(r"(\[role.*\])", "\\1\nmax = 3", SPEC) + '[scale]\nttft = "2s"\nitl = "50ms"\n')
    assert main(["fleet", "render", str(spec)]) == 0
    deployments = of_kind(list(yaml.safe_load_all(capsys.readouterr().out)), "Deployment")
    assert {*deployments} == {"chat-prefill", "chat-decode", "chat-controller"}
    assert main(["fleet", "render", str(spec), "--chart", str(tmp_path / "chart")]) == 0
    values = yaml.safe_load((tmp_path / "chart/values.yaml").read_text())
    assert values["autoscaling"]["decode"] == {"max": 3}


def test_what_starts_members_itself_is_refused_for_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "chat.toml"
    spec.write_text(SPEC)
    assert main(["fleet", "apply", str(spec)]) == 2
    assert "kvferry fleet render SPEC | kubectl apply" in capsys.readouterr().err
