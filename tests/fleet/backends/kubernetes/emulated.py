"""A cluster without a cluster: kmock as its API server. No controller of Kubernetes' own runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kmock import KubernetesEmulator, KubernetesError, Request, Server, action

Object = dict[str, Any]

_CONFLICT, _FORBIDDEN = 409, 403


class ApiServer(KubernetesEmulator):
    """For clients with a token, `fails` has actions that are refused with a status, and `rules` are a Role's: nothing
    else is allowed. `scaled`: each change of a workload's scale, in order."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.fails: dict[action, int] = {}
        self.rules: list[Object] | None = None
        self.used: set[tuple[str, str]] = set()
        """Resources and verbs that clients with a token used."""
        self.tokens: list[str] = []
        self.scaled: list[tuple[str, int]] = []
        self.refuses_scale = False
        self._version = 0

    async def _handle(self, request: Request) -> aiohttp.web.StreamResponse:
        if "Authorization" in request.headers:
            self.tokens.append(request.headers["Authorization"])
            self._require_allowed(request)
            if (status := self.fails.get(request.action)) is not None:  # type: ignore[arg-type]
                raise KubernetesError(status=status, reason="Fault", message="injected by a test")
        if request.url.path.endswith("/scale"):
            if self.refuses_scale:
                raise KubernetesError(status=500, reason="Fault", message="injected by a test")
            name = request.url.path.split("/")[-2]
            self.scaled.append((name, request.data["spec"]["replicas"]))
            return aiohttp.web.json_response({"kind": "Scale", "spec": request.data["spec"]})
        if request.action in (action.CREATE, action.UPDATE) and isinstance(request.data, dict):
            self._advance_version(request)
        return await super()._handle(request)

    def _require_allowed(self, request: Request) -> None:
        """Refuse what RBAC would."""
        before, _, after = request.url.path.partition("/namespaces/")
        group = before.split("/")[2] if before.startswith("/apis/") else ""
        resource, _, name = after.partition("/")[2].partition("/")
        if name.endswith("/scale"):
            resource, name = f"{resource}/scale", name.removesuffix("/scale")
        verb = {"GET": "get", "PATCH": "patch", "POST": "create", "DELETE": "delete"}[request.method]
        self.used.add((resource, verb))
        if self.rules is not None and not any(_allows(rule, group, resource, name, verb) for rule in self.rules):
            raise KubernetesError(status=_FORBIDDEN, reason="Forbidden", message=f"cannot {verb} {resource} {name}")

    def _advance_version(self, request: Request) -> None:
        """Set resourceVersion, which kmock does not; a change may name the version that it is made for."""
        metadata = request.data.setdefault("metadata", {})
        key = (request.resource, request.namespace, request.name)
        if request.action is action.UPDATE and key in self.objects and not self.objects[key].deleted:
            version = self.objects[key].raw["metadata"]["resourceVersion"]
            if metadata.get("resourceVersion", version) != version:
                raise KubernetesError(status=_CONFLICT, reason="Conflict", message="the object has been modified")
        self._version += 1
        metadata["resourceVersion"] = str(self._version)

    def existing(self, plural: str) -> list[Object]:
        """All objects of a kind."""
        return [each.raw for (kind, _, _), each in self.objects.items() if kind.plural == plural and not each.deleted]


def _allows(rule: Object, group: str, resource: str, name: str, verb: str) -> bool:
    names = rule.get("resourceNames")
    is_named = names is None or name in names
    return is_named and group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]


class Cluster:
    """The API server while it is `running`, with a kubeconfig for it."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self.url = ""

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[Cluster]:
        async with self.server, Server(self.server) as served:
            self._client = served.client
            self.url = str(served.url).rstrip("/")
            with _kubeconfig(write_kubeconfig(folder, self.url)):
                yield self

    async def create(self, manifest: Object) -> None:
        """Create an object, as `kubectl apply` does."""
        async with self._client.post(_collection(manifest), json=manifest) as answer:
            assert answer.status == 200, await answer.text()

    async def patch(self, manifest: Object, changes: Object) -> None:
        """Change an object, as some other client does."""
        kind = {"Content-Type": "application/merge-patch+json"}
        path = f"{_collection(manifest)}/{manifest['metadata']['name']}"
        async with self._client.patch(path, json=changes, headers=kind) as answer:
            assert answer.status == 200, await answer.text()

    async def delete(self, manifest: Object) -> None:
        """Delete an object."""
        async with self._client.delete(f"{_collection(manifest)}/{manifest['metadata']['name']}") as answer:
            assert answer.status == 200, await answer.text()


def lease(name: str = "chat-controller") -> Object:
    """A Lease as the manifests have it."""
    metadata = {"name": name, "namespace": "llm"}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}


def _collection(manifest: Object) -> str:
    kind = manifest["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    root = "apis" if "/" in manifest["apiVersion"] else "api"
    return f"/{root}/{manifest['apiVersion']}/namespaces/{manifest['metadata']['namespace']}/{plural}"


def write_kubeconfig(folder: Path, url: str, token: str = "a token of the API") -> Path:
    """The file with which a cluster is reached."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {"server": url}}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def _kubeconfig(path: Path) -> Iterator[None]:
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(path)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("KUBECONFIG", None)
        else:
            os.environ["KUBECONFIG"] = before
