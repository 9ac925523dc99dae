"""One namespace of a cluster, by way of its API server: what is asked for has a deadline, and what changes is followed.

The official client knows how to reach a cluster and how to prove who asks; what is sent and received stays plain JSON.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import aiohttp
import msgspec
from kubernetes.aio import client, config

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.errors import ClusterError

logger = logging.getLogger(__name__)

Object = dict[str, Any]

_ASK_S = 10.0
_WATCH_S, _MARGIN_S = 60, 10.0
"""How long the server is asked to tell changes in one answer, and how much later than that a connection that has told
nothing is taken for dropped."""
_WAITS_S = (0.2, 15.0)
"""Waits before what is followed is listed again: the first, which doubles each time, and the longest."""
_GONE, _NOT_FOUND, _CONFLICT = 410, 404, 409
_PLURALS = {
    "Pod": "pods",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "Service": "services",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "PodMonitor": "podmonitors",
    "Lease": "leases",
}


class Follower(Protocol):
    """Told what is there."""

    def listing(self) -> None:
        """Called when a list is asked for."""

    def listed(self, objects: Sequence[Object]) -> None:
        """Called with all objects that are there."""

    def changed_to(self, object: Object, *, deleted: bool) -> None:
        """Called with an object that is new or different, or is not there any more."""


class Cluster:
    """Owns the connections. `connect` makes one. `may_change`: nothing is changed any more once it says no."""

    def __init__(self, connection: client.ApiClient, namespace: str, may_change: Callable[[], bool]) -> None:
        self._connection, self._namespace, self._may_change = connection, namespace, may_change

    @classmethod
    async def connect(
        cls, namespace: str, context: str | None, may_change: Callable[[], bool] = lambda: True
    ) -> Cluster:
        """Connect as the kubeconfig says, or within a pod its service account. Raises `ConfigError`."""
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and context is None and "KUBECONFIG" not in os.environ:
                config.load_incluster_config(settings)
            else:
                place = os.environ.get("KUBECONFIG", config.KUBE_CONFIG_DEFAULT_LOCATION)
                await config.load_kube_config(place, context, settings, persist_config=False)
        except (config.ConfigException, OSError, ValueError) as error:
            raise ConfigError(f"backend.kubernetes: there is no way to a cluster: {error}") from error
        return cls(client.ApiClient(settings), namespace, may_change)

    async def close(self) -> None:
        """Let go of all connections."""
        await self._connection.close()

    # One thing asked.

    async def create(self, object: Object) -> Object:
        """Raises `ClusterError`; its status is 409 if it is there already."""
        return await self._ask("POST", self._path(object["apiVersion"], object["kind"]), body=object)

    async def apply(self, object: Object) -> None:
        """Create or change an object so that it is as given. Raises `ClusterError`."""
        try:
            await self.create(object)
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            await self.patch(object["apiVersion"], object["kind"], object["metadata"]["name"], object)

    async def patch(self, version: str, kind: str, name: str, changes: Object) -> Object:
        """Merge changes into an object. Raises `ClusterError`."""
        return await self._ask("PATCH", f"{self._path(version, kind)}/{name}", body=changes)

    async def read(self, version: str, kind: str, name: str) -> Object:
        """Raises `ClusterError`; its status is 404 if there is no such object."""
        return await self._ask("GET", f"{self._path(version, kind)}/{name}")

    async def delete(self, version: str, kind: str, name: str, grace_s: int | None = None, uid: str = "") -> bool:
        """Delete an object; whether it was there. `uid`: of that one, so that another of its name is left. Raises
        `ClusterError`."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._ask("DELETE", f"{self._path(version, kind)}/{name}", body=options)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return False
            if not uid or error.status != _CONFLICT or await self.has(version, kind, name, uid):
                raise  # in a conflict, either another one is there, or this one was changed meanwhile
            return False
        return True

    async def has(self, version: str, kind: str, name: str, uid: str = "") -> bool:
        """Whether an object is there; with `uid`, that one. Raises `ClusterError`."""
        try:
            found = await self.read(version, kind, name)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
            return False
        return not uid or found["metadata"].get("uid") == uid

    async def list_all(self, version: str, kind: str, selector: str) -> tuple[list[Object], str]:
        """All objects with these labels, and the version of the list. Raises `ClusterError`."""
        listed = await self._ask("GET", self._path(version, kind), [("labelSelector", selector)])
        return listed.get("items") or [], str(listed.get("metadata", {}).get("resourceVersion", ""))

    def _path(self, version: str, kind: str) -> str:
        root = "api" if "/" not in version else "apis"
        return f"/{root}/{version}/namespaces/{self._namespace}/{_PLURALS[kind]}"

    async def _ask(
        self, method: str, path: str, query: Sequence[tuple[str, str]] = (), body: Object | None = None
    ) -> Object:
        if method != "GET" and not self._may_change():
            raise ClusterError("another controller looks after this fleet, and this one changes nothing any more")
        response = await self._send(method, path, query, body, aiohttp.ClientTimeout(total=_ASK_S))
        try:
            async with asyncio.timeout(_ASK_S):
                content = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(error) from error
        if response.status >= 400:
            raise _refused(response.status, content)
        return _decoded(content)

    async def _send(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: Object | None,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """The answer, once its head is there."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            async with asyncio.timeout(_ASK_S):
                request = await self._connection.param_serialize(
                    method,
                    path,
                    query_params=[*query],
                    header_params={"Content-Type": kind, "Accept": "application/json"},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                response = await self._connection.call_api(*request, _request_timeout=limits)
        except (aiohttp.ClientError, OSError, TimeoutError, config.ConfigException) as error:
            raise _unreachable(error) from error
        found: aiohttp.ClientResponse = response.response
        return found

    # What changes.

    async def follow(self, version: str, kind: str, selector: str, follower: Follower, since: str) -> None:
        """Tell all changes after the list of version `since`, for ever. When the connection is lost, or the server
        does not remember what has happened since, everything is listed again."""
        first, longest = _WAITS_S
        wait_s = first
        while True:
            begun = SYSTEM_CLOCK.monotonic()
            try:
                if not since:
                    follower.listing()
                    objects, since = await self.list_all(version, kind, selector)
                    follower.listed(objects)
                async with aclosing(self._watch(self._path(version, kind), selector, since)) as events:
                    async for event in events:
                        if event["type"] != "BOOKMARK":
                            follower.changed_to(event["object"], deleted=event["type"] == "DELETED")
                        since = event["object"]["metadata"].get("resourceVersion", since)
            except ClusterError as error:
                since = ""
                logger.log(
                    logging.DEBUG if error.status == _GONE else logging.WARNING, "pods are listed again: %s", error
                )
            except Exception:
                # The edge: one odd object must not keep all others from being followed.
                since = ""
                logger.exception("what the API server tells is not understood; pods are listed again")
            wait_s = first if SYSTEM_CLOCK.monotonic() - begun > longest else min(2 * wait_s, longest)
            await asyncio.sleep(wait_s)

    async def _watch(self, path: str, selector: str, since: str) -> AsyncGenerator[Object, None]:
        """Each change, until the server has told enough. Raises `ClusterError`."""
        query = [
            ("labelSelector", selector),
            ("resourceVersion", since),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(_WATCH_S)),
        ]
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_ASK_S, sock_read=_WATCH_S + _MARGIN_S)
        response = await self._send("GET", path, query, None, limits)
        try:
            if response.status >= 400:
                raise _refused(response.status, await response.read())
            while line := await response.content.readline():
                event = _decoded(line)
                if event.get("type") == "ERROR":
                    raise _refused(event.get("object", {}).get("code", 0), line)
                yield event
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: a line is too long
            raise _unreachable(error) from error
        finally:
            response.close()


def _decoded(content: bytes) -> Object:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except ValueError as error:  # neither JSON nor text
        raise ClusterError(f"what answers is not a Kubernetes API server: {error}") from error


def _refused(status: int, content: bytes) -> ClusterError:
    """The server says why in a `Status`, which an event of a watch has as its object."""
    try:
        said = msgspec.json.decode(content, type=dict[str, Any])
        said = said.get("object", said)
        return ClusterError(f"{said.get('reason') or status}: {said.get('message') or ''}".rstrip(": "), status)
    except (msgspec.MsgspecError, AttributeError):
        return ClusterError(f"{status}: {content[:200].decode(errors='replace')}", status)


def _unreachable(error: Exception) -> ClusterError:
    return ClusterError(f"the API server does not answer: {str(error) or type(error).__name__}")
