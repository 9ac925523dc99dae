"""Wraps Dynamo's runtime for Python (`dynamo._core`): its discovery, and calls of workers.

Dynamo's errors have no types, and are distinguished by their text: one that begins with `Unavailable:` means that the
worker is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from kvferry.core.errors import InvalidRequest, MissingDependency, QueueFull, RequestError, RequestFailed
from kvferry.core.messages.dynamo import DynamoEndpoint
from kvferry.core.messages.instance_facts import InstanceFacts

logger = logging.getLogger(__name__)


class WorkerLost(RequestError):
    """The worker does not take the request, or its answer ends too early. Another worker may serve the request."""

    status = 502
    kind = "server_error"


class DynamoRuntime:
    """The runtime of the event loop on which it is made; at most one in a process. Dynamo's own environment variables
    (`DYN_DISCOVERY_BACKEND`, `DYN_REQUEST_PLANE`, `DYN_EVENT_PLANE`) determine how it finds and reaches workers."""

    def __init__(self) -> None:
        """Raises `MissingDependency` if Dynamo's runtime is not installed."""
        try:
            from dynamo._core import Context, DistributedRuntime
        except ImportError as error:
            raise MissingDependency("dynamo://", "ai-dynamo-runtime", "dynamo") from error
        self._make_context = Context
        self._runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE"),
        )

    async def client(self, endpoint: DynamoEndpoint) -> WorkerClient:
        """A client of one endpoint, which follows Dynamo's discovery."""
        return WorkerClient(endpoint, await self._runtime.endpoint(endpoint.path).client(), self._make_context)

    def endpoint(self, endpoint: DynamoEndpoint) -> Any:
        """Dynamo's own object for an endpoint, at which this process serves."""
        return self._runtime.endpoint(endpoint.path)

    async def register_model(self, endpoint: Any, model: str, facts: InstanceFacts) -> None:
        """Register this process in Dynamo's discovery, with its endpoint, model and phase. `model`: the folder or name
        of the model."""
        from dynamo._core import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model

        config = ModelRuntimeConfig()
        config.context_length = facts.max_model_len
        config.total_kv_blocks = facts.num_kv_tokens // max(1, facts.block_size)
        config.max_num_seqs = facts.max_num_seqs
        config.kv_event_publishing_enabled = False
        needs: list[Any] | None = None
        match facts.role:
            case "prefill":
                kind, role, needs = ModelType.Prefill, WorkerType.Prefill, [[WorkerType.Decode]]
            case "decode":
                kind, role, needs = ModelType.Chat | ModelType.Completions, WorkerType.Decode, [[WorkerType.Prefill]]
            case "both":
                kind, role = ModelType.Chat | ModelType.Completions, WorkerType.Aggregated
        await register_model(
            ModelInput.Tokens,
            kind,
            endpoint,
            model,
            model_name=facts.model_names[0],
            worker_type=role,
            needs=needs,
            kv_cache_block_size=facts.block_size,
            runtime_config=config,
        )

    def close(self) -> None:
        """End the runtime."""
        self._runtime.shutdown()


class WorkerClient:
    """Calls the workers of one endpoint."""

    def __init__(self, endpoint: DynamoEndpoint, client: Any, make_context: Any) -> None:
        self.endpoint, self._client, self._make_context = endpoint, client, make_context

    def worker_ids(self) -> list[int]:
        """The ids of the workers that Dynamo's discovery has now, ascending."""
        return sorted(self._client.instance_ids())

    async def call(
        self, worker_id: int, request: dict[str, Any], *, accept_s: float, silence_s: float
    ) -> AsyncGenerator[Any]:
        """Call a worker, and yield its outputs for one request. Closing the generator makes the worker
        stop. `accept_s`: maximum seconds until the worker accepts the request; `silence_s`: between two outputs. Raises
        `WorkerLost`, also after these times, and other `RequestError`s."""
        context = self._make_context()
        try:
            async with asyncio.timeout(accept_s):
                stream = await self._client.direct(request, worker_id, context=context)
            while True:
                async with asyncio.timeout(silence_s):
                    output = await anext(stream, None)
                if output is None:
                    return
                if output.is_error():
                    raise _failure(" ".join(output.comments() or ["the worker answered with an error"]))
                yield output.data()
        except TimeoutError:
            raise WorkerLost(f"worker {worker_id:x} of {self.endpoint.path} does not answer") from None
        except RequestError:
            raise
        except Exception as error:  # the runtime raises bare Exceptions and ValueErrors
            raise _failure(str(error)) from error
        finally:
            with suppress(Exception):  # it has ended by itself
                context.stop_generating()


def _failure(text: str) -> RequestError:
    """The error that corresponds to a text of Dynamo's."""
    kind, _, message = text.partition(":")
    match kind.strip():
        case "InvalidArgument":
            return InvalidRequest(f"the worker refuses the request:{message}")
        case "WorkerOverloaded" | "ResourceExhausted":
            return QueueFull(f"the worker takes no more requests:{message}")
        case (
            "Unavailable"
            | "CannotConnect"
            | "Disconnected"
            | "ConnectionTimeout"
            | "EngineShutdown"
            | "StreamIncomplete"
        ):
            return WorkerLost(text)
    return RequestFailed(f"the worker failed: {text}")
