"""A cluster without a cluster: kmock as its API server, and beside it as much of a node as a backend sees of one.

No container runs. A node says of each pod what its name means: see `kvferry.testing.backends`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import kubernetes_validate
import yaml
from kmock import KubernetesEmulator, KubernetesError, Request, Server, action

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import FLEET_LABEL, PART_LABEL
from kvferry.fleet.backends.kubernetes.pod import MEMBER_LABEL

VERSION = "1.37"
_LOOK_S = 0.03
_FINALIZER = "tests/node"
_UNPROCESSABLE, _GONE, _CONFLICT, _FORBIDDEN = 422, 410, 409, 403
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class Faults:
    """What a server does wrong at random. `share`: of requests that come with a token and fail. `most`: pods of each
    role that may be there at a time; `exceeded`: when there were more."""

    def __init__(self, dice: random.Random, most: dict[str, int]) -> None:
        self.dice, self.most, self.share = dice, most, 0.0
        self.exceeded: list[str] = []
        self.watch_hangs = self.does_without_saying_so = False
        self._past: deque[dict[str, Any]] = deque(maxlen=50)

    def before(self, request: Request) -> None:
        """What is refused."""
        if self.dice.random() < self.share:
            by_action = {action.LIST: [_GONE], action.WATCH: [_GONE], action.DELETE: [_CONFLICT]}
            status = self.dice.choice([429, 500, 503, *by_action.get(request.action, [])])  # type: ignore[call-overload]
            raise KubernetesError(status=status, reason="Random", message="before")

    def after(self, request: Request) -> None:
        """What is done, and nobody hears of it."""
        if request.method != "GET" and (self.does_without_saying_so or self.dice.random() < self.share):
            raise KubernetesError(status=504, reason="Random", message="after")

    def count(self, pods: list[dict[str, Any]]) -> None:
        """Look whether there are too many."""
        found = Counter(one["metadata"].get("labels", {}).get(PART_LABEL, "") for one in pods if is_member(one))
        self.exceeded += [f"{number} of {role}" for role, number in found.items() if number > self.most.get(role, 99)]

    async def told(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Late and repeated; or nothing any more, for as long as the connection is there."""
        is_silent = False
        async for event in events:
            is_silent = is_silent or self.watch_hangs
            if is_silent:
                continue
            yield event
            if isinstance(event, dict):
                self._past.append(copy.deepcopy(event))
                if self.dice.random() < self.share:
                    yield self.dice.choice(self._past)


def is_member(pod: dict[str, Any]) -> bool:
    """Whether it has the name that goes with its labels."""
    labels = pod["metadata"].get("labels", {})
    return bool(pod["metadata"]["name"] == f"{labels.get(FLEET_LABEL)}-{labels.get(MEMBER_LABEL)}")


class ApiServer(KubernetesEmulator):
    """kmock deletes at once. An API server waits for a pod's node, for which a finalizer stands here; and it refuses
    objects that are not valid. For those who come with a token, `fails` has actions that are refused with a status, in
    place of what they would do, and `rules` are those of a Role: nothing else is allowed."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.fails: dict[action, int] = {}
        self.changes: list[tuple[str, str]] = []
        """What was asked to be changed, and with which credentials."""
        self.rules: list[dict[str, Any]] | None = None
        self.used: set[tuple[str, str]] = set()
        """Resources and verbs, of those that came with a token."""
        self.faults: Faults | None = None
        self._num_changes = 0
        self._watches: set[asyncio.Task[Any]] = set()
        self.resources["v1/pods"] = {"kind": "Pod", "namespaced": True}

    def drop_watches(self) -> None:
        """Connections that tell what changes are cut."""
        for task in self._watches:
            task.cancel()

    async def _handle(self, request: Request) -> aiohttp.web.StreamResponse:
        if request.action in (action.CREATE, action.UPDATE, action.DELETE):
            what = request.url.path.rpartition("/namespaces/")[2]
            self.changes.append((request.headers.get("Authorization", ""), f"{request.method} {what}"))
        if "Authorization" in request.headers:
            self._require_allowed(request)
            if self.faults is not None:
                self.faults.before(request)
            if (status := self.fails.get(request.action)) is not None:  # type: ignore[arg-type]
                if status == _GONE and request.action is action.WATCH:
                    told = {"type": "ERROR", "object": {"code": _GONE, "reason": "Expired", "message": "too old"}}
                    return aiohttp.web.json_response(told)
                raise KubernetesError(status=status, reason="Told", message="by a test")
        if request.action is action.WATCH:
            task = asyncio.current_task()
            assert task is not None
            self._watches.add(task)
            task.add_done_callback(self._watches.discard)
        if request.action in (action.CREATE, action.UPDATE) and isinstance(request.data, dict):
            self._number(request)
        if request.action is action.CREATE:
            self._require_valid(request.data)
            if request.data["kind"] == "Pod":
                request.data["metadata"]["finalizers"] = [_FINALIZER]
        key = (request.resource, request.namespace, request.name)
        options = request.data if isinstance(request.data, dict) else {}
        if request.action is action.DELETE and key in self.objects and not self.objects[key].deleted:
            uid = options.get("preconditions", {}).get("uid")
            if uid not in (None, self.objects[key].raw["metadata"]["uid"]):
                raise KubernetesError(status=_CONFLICT, reason="Conflict", message="it is another one")
            if "/pods/" in request.url.path:
                grace_s = options.get("gracePeriodSeconds", 30)
                known = self.objects[key].raw["metadata"].get("deletionGracePeriodSeconds", grace_s)
                changes: dict[str, Any] = {"deletionGracePeriodSeconds": min(known, grace_s)}
                self.objects[key].patch({"metadata": {**changes, **({} if grace_s else {"finalizers": []})}})
        answer = await super()._handle(request)
        if self.faults is not None and "Authorization" in request.headers:
            self.faults.count(self.pods())
            self.faults.after(request)
        return answer

    async def _serve_watch(self, request: Request) -> AsyncIterator[Any]:
        events = super()._serve_watch(request)
        async for event in events if self.faults is None else self.faults.told(events):
            yield event

    def _require_allowed(self, request: Request) -> None:
        """As an API server with RBAC. An object that is to be made has no name yet."""
        group, resource, name = _place(request.url.path)
        verb = _VERBS[request.method]
        if verb == "get" and not name:
            verb = "watch" if request.action is action.WATCH else "list"
        self.used.add((resource, verb))
        if self.rules is None or any(_allows(rule, group, resource, name, verb) for rule in self.rules):
            return
        raise KubernetesError(status=_FORBIDDEN, reason="Forbidden", message=f"cannot {verb} {resource} {name}")

    def _number(self, request: Request) -> None:
        """Versions and uids, which kmock does not know; a change may name the version that it is made for."""
        metadata = request.data.setdefault("metadata", {})
        key = (request.resource, request.namespace, request.name)
        if request.action is action.UPDATE and key in self.objects and not self.objects[key].deleted:
            there = self.objects[key].raw["metadata"]
            if any(metadata.get(name, there[name]) != there[name] for name in ("resourceVersion", "uid")):
                raise KubernetesError(status=_CONFLICT, reason="Conflict", message="the object has been modified")
        self._num_changes += 1
        metadata["resourceVersion"] = str(self._num_changes)
        if request.action is action.CREATE:
            metadata["uid"] = f"uid-{self._num_changes}"

    @staticmethod
    def _require_valid(object: dict[str, Any]) -> None:
        try:
            kubernetes_validate.validate(object, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise KubernetesError(status=_UNPROCESSABLE, reason="Invalid", message=str(error)) from error

    def pods(self) -> list[dict[str, Any]]:
        """Those that are there."""
        return self.there("pods")

    def there(self, plural: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return [one.raw for (kind, _, _), one in self.objects.items() if kind.plural == plural and not one.deleted]


def _place(path: str) -> tuple[str, str, str]:
    """Group, resource and name in a path such as /apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME."""
    before, _, after = path.partition("/namespaces/")
    resource, _, name = after.partition("/")[2].partition("/")
    return before.split("/")[2] if before.startswith("/apis/") else "", resource, name


def _allows(rule: dict[str, Any], group: str, resource: str, name: str, verb: str) -> bool:
    names = rule.get("resourceNames")
    is_named = names is None or name in names
    return is_named and group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]


class Node:
    """Says of each pod how its container is, and deletes those whose owner is gone. `end` has one end by itself;
    `is_away`: it says nothing any more."""

    def __init__(self, server: ApiServer, client: aiohttp.ClientSession) -> None:
        self._server, self._client = server, client
        self._since: dict[str, float] = {}
        self._ends: set[str] = set()
        self.num_begun = 0
        """Containers that have begun to run."""
        self.is_away = False

    def end(self, member: str) -> None:
        """Its container ends with exit code 7."""
        self._ends.add(member)

    async def run(self) -> None:
        while True:
            for pod in self._server.pods():
                await self._collect(pod)
                if not self.is_away:
                    await self._look_after(pod)
            await asyncio.sleep(_LOOK_S)

    async def _collect(self, pod: dict[str, Any]) -> None:
        """As Kubernetes' garbage collector."""
        owners = pod["metadata"].get("ownerReferences", [])
        there = {one["metadata"]["uid"] for one in self._server.there("configmaps")}
        if owners and not there & {one["uid"] for one in owners} and "deletionTimestamp" not in pod["metadata"]:
            await self.deletes(pod)

    async def _look_after(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        name = metadata.get("labels", {}).get(MEMBER_LABEL, "")
        what, status = name.partition("-")[0], pod.get("status") or {}
        if "deletionTimestamp" in metadata:
            since = self._since.setdefault(metadata["name"], SYSTEM_CLOCK.monotonic())
            is_over = SYSTEM_CLOCK.monotonic() - since >= metadata.get("deletionGracePeriodSeconds", 30)
            if what != "stays" or is_over or status.get("phase") == "Failed":
                self._since.pop(metadata["name"], None)
                self._ends.discard(name)
                await self._patch(pod, {"metadata": {"finalizers": []}})
        elif name in self._ends and status.get("phase") == "Running":
            await self.says(pod, terminated(7, "the last words\n"))
        elif not status:
            await self.says(pod, self._begun(what))

    def _begun(self, what: str) -> dict[str, Any]:
        if what == "fails":
            return terminated(7, "the last words\n")
        if what == "wrong":
            return terminated(2, "kvferry: error: the model is not there\n")
        self.num_begun += 1
        return running(f"10.0.0.{self.num_begun}", started=what != "waits")

    async def says(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        """The status of a pod is this."""
        await self._patch(pod, {"status": status}, "/status")

    async def creates(self, one: dict[str, Any]) -> None:
        """Somebody makes an object."""
        async with self._client.post(_collection(one), json=one) as answer:
            assert answer.status == 200, await answer.text()

    async def deletes(self, one: dict[str, Any]) -> None:
        """Somebody deletes an object."""
        async with self._client.delete(f"{_collection(one)}/{one['metadata']['name']}") as answer:
            assert answer.status == 200, await answer.text()

    async def is_answered(self, within_s: float) -> bool:
        """Whether the server answers anything at all: kmock may hang for ever once watches were cut."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._client.get("/api/v1/namespaces/llm/pods") as answer:
                return answer.status == 200
        return False

    async def _patch(self, pod: dict[str, Any], changes: dict[str, Any], part: str = "") -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}{part}"
        kind = {"Content-Type": "application/merge-patch+json"}
        async with self._client.patch(path, json=changes, headers=kind) as answer:
            assert answer.status in (200, 404), await answer.text()


def _collection(one: dict[str, Any]) -> str:
    kind = one["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    root = "apis" if "/" in one["apiVersion"] else "api"
    return f"/{root}/{one['apiVersion']}/namespaces/{one['metadata']['namespace']}/{plural}"


def running(address: str, *, started: bool) -> dict[str, Any]:
    """The status of a pod whose container runs; `started`: and has passed its startup probe."""
    container = {"name": "kvferry", "started": started, "ready": started, "state": {"running": {}}}
    return {"phase": "Running", "podIP": address, "containerStatuses": [container]}


def terminated(code: int, message: str, reason: str = "Error") -> dict[str, Any]:
    """The status of a pod whose container has ended."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Failed", "containerStatuses": [{"name": "kvferry", "started": False, "state": state}]}


class Cluster:
    """Both, while it is `running`."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self.node: Node
        self.url = ""

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[Cluster]:
        async with self.server, Server(self.server) as served:
            self.node = Node(self.server, served.client)
            node = asyncio.create_task(self.node.run())
            try:
                self.url = str(served.url).rstrip("/")
                with _kubeconfig(write_kubeconfig(folder, self.url)):
                    yield self
            finally:
                has_failed = node.done()
                node.cancel()
                await asyncio.wait([node])
                assert not has_failed, node


def write_kubeconfig(folder: Path, url: str, token: str = "a token of the API") -> Path:
    """The file with which a cluster is reached."""
    told = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {"server": url}}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(told))
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
