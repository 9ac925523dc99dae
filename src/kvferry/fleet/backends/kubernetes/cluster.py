"""One namespace of a cluster through its API server: each request has a deadline.

The official client finds the cluster and authenticates; requests and answers are plain JSON.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import client, config

from kvferry.core.errors import ConfigError, KvferryError

Object = dict[str, Any]

_PLURALS = {"Deployment": "deployments", "LeaderWorkerSet": "leaderworkersets", "Lease": "leases"}


class ClusterError(KvferryError):
    """The API server refused a request or did not answer. `status`: the HTTP status; 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """Owns the connections; `connect` makes one. `timeout_s`: maximum seconds for each request."""

    def __init__(self, connection: client.ApiClient, namespace: str, timeout_s: float = 10.0) -> None:
        self._connection, self._namespace, self._timeout_s = connection, namespace, timeout_s

    @classmethod
    async def connect(cls, namespace: str, context: str | None) -> Cluster:
        """Connect with the kubeconfig; within a pod, with its service account. Raises `ConfigError`."""
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and context is None and "KUBECONFIG" not in os.environ:
                config.load_incluster_config(settings)
            else:
                path = os.environ.get("KUBECONFIG", config.KUBE_CONFIG_DEFAULT_LOCATION)
                await config.load_kube_config(path, context, settings, persist_config=False)
        except (config.ConfigException, OSError, ValueError) as error:
            raise ConfigError(f"backend.kubernetes: there is no way to a cluster: {error}") from error
        return cls(client.ApiClient(settings), namespace)

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    async def read(self, version: str, kind: str, name: str) -> Object:
        """Read an object. Raises `ClusterError`; its status is 404 if there is none."""
        return await self._request("GET", self._path(version, kind, name))

    async def patch(self, version: str, kind: str, name: str, changes: Object) -> Object:
        """Merge changes into an object. Raises `ClusterError`."""
        return await self._request("PATCH", self._path(version, kind, name), changes)

    async def scale(self, version: str, kind: str, name: str, replicas: int) -> None:
        """Set the replicas of a workload through its scale subresource. Raises `ClusterError`."""
        await self._request("PATCH", f"{self._path(version, kind, name)}/scale", {"spec": {"replicas": replicas}})

    def _path(self, version: str, kind: str, name: str) -> str:
        return f"/apis/{version}/namespaces/{self._namespace}/{_PLURALS[kind]}/{name}"

    async def _request(self, method: str, path: str, body: Object | None = None) -> Object:
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            async with asyncio.timeout(self._timeout_s):
                request = await self._connection.param_serialize(
                    method,
                    path,
                    header_params={"Content-Type": content_type, "Accept": "application/json"},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                limits = aiohttp.ClientTimeout(total=self._timeout_s)
                response = (await self._connection.call_api(*request, _request_timeout=limits)).response
                content: bytes = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, config.ConfigException) as error:
            raise ClusterError(f"the API server does not answer: {str(error) or type(error).__name__}") from error
        if response.status >= 400:
            raise _refused(response.status, content)
        return _decoded(content)


def _decoded(content: bytes) -> Object:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except ValueError as error:  # neither JSON nor text
        raise ClusterError(f"the answer is not a Kubernetes API server's: {error}") from error


def _refused(status: int, content: bytes) -> ClusterError:
    """The error for a `Status` object, which has the reason why a request was refused."""
    try:
        answer = msgspec.json.decode(content, type=dict[str, Any])
        return ClusterError(f"{answer.get('reason') or status}: {answer.get('message') or ''}".rstrip(": "), status)
    except msgspec.MsgspecError:
        return ClusterError(f"{status}: {content[:200].decode(errors='replace')}", status)
