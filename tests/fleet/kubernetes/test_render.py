"""A fleet as objects of Kubernetes: valid by the schemas of those who will read them, and the same in a chart."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from kvferry.cli.main import main
from kvferry.core.errors import ConfigError
from kvferry.fleet.control.spec import fleet_from
from kvferry.fleet.kubernetes.chart import write_chart
from kvferry.fleet.kubernetes.render import render
from kvferry.fleet.kubernetes.values import Values

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
        "router": {"requests": {"cpu": "500m"}},
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
    "gang": pooling(VLLM, WIDE, **ON_HOSTS, gang="kubernetes"),
    "gang of Volcano's": pooling(VLLM, WIDE, **ON_HOSTS, gang="volcano"),
    "disaggregated set": pooling(disaggregated_set=True),
    "disaggregated set on several pods": pooling(VLLM, WIDE, **ON_HOSTS, disaggregated_set=True),
    "token of one's own": pooling(token_secret="mine"),
    "units": in_units(),
    "units apart": in_units("spread", gang="kubernetes"),
    "units packed": in_units("pack", gang="volcano"),
}


def rendered(told: OBJECTS) -> list[OBJECTS]:
    return render(fleet_from(told), Values(), "the token of a test")


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
    objects = rendered(CASES[case])
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
    ],
)
def test_the_schemas_refuse_what_is_wrong(kind: str, path: str, value: Any) -> None:
    found = copy.deepcopy([one for told in CASES.values() for one in rendered(told) if one["kind"] == kind])
    *way, last = path.split(".")
    place: Any = found[0]
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(found[0])


@pytest.mark.parametrize("case", CASES)
def test_a_chart_with_its_values_is_the_manifests(case: str, tmp_path: Path) -> None:
    """Helm itself is not here: its three expressions that a chart uses are filled in as it does."""
    fleet = fleet_from(CASES[case])
    write_chart(fleet, tmp_path)
    values = {**yaml.safe_load((tmp_path / "values.yaml").read_text()), "token": "the token of a test"}
    assert yaml.safe_load((tmp_path / "Chart.yaml").read_text())["name"] == "chat"

    def fill(found: re.Match[str]) -> str:
        expression = re.fullmatch(
            r'toJson \.(Values\.[\w.]+|Release\.Namespace)|required "set token" \.(Values\.token) \| toJson', found[1]
        )
        assert expression is not None, found[1]
        place: Any = {"Values": values, "Release": {"Namespace": fleet.backend.kubernetes.namespace}}  # type: ignore[union-attr]
        for step in (expression[1] or expression[2]).split("."):
            place = place[step]
        return json.dumps(place)

    text = re.sub(r"\{\{ (.+?) \}\}", fill, (tmp_path / "templates/fleet.yaml").read_text())
    assert list(yaml.safe_load_all(text)) == rendered(CASES[case])


def test_pods_may_do_nothing_that_they_need_not() -> None:
    for told in CASES.values():
        for pod in pods(rendered(told)):
            (container,) = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
            written = {one["mountPath"] for one in container["volumeMounts"]}
            assert written == {"/dev/shm", "/tmp", "/cache", "/models"}


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


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (pooling(pod={"decode": {"hosts": 2}}), "only vLLM's instances"),
        (pooling(VLLM, pod={"router": {"hosts": 2}}), "only vLLM's instances"),
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
