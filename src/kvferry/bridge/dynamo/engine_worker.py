"""kvferry's engine as a worker of Dynamo's, so that Dynamo's own frontend hands off between kvferry's instances.

The instance registers its model in Dynamo's discovery and takes requests over Dynamo's request plane, beside its HTTP
server. P answers with its ticket in `disaggregated_params`, which the frontend hands to D as `prefill_result`. As of
Dynamo 1.7.0.dev20261026.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec

from kvferry.bridge.dynamo.runtime import DynamoRuntime
from kvferry.core import entropy
from kvferry.core.errors import InvalidRequest, RequestError
from kvferry.core.messages.dynamo import DynamoEndpoint
from kvferry.core.messages.hand_off import HandOff, Produce, TokenLogprobs, parse_hand_off
from kvferry.core.messages.openai import ContextLengthExceeded
from kvferry.core.request import EngineOutput, Request, are_tokens
from kvferry.core.sampling import SamplingParams
from kvferry.engine.server.engine_protocol import EngineClient

logger = logging.getLogger(__name__)

TICKET = "kv_transfer_params"
"""Where `disaggregated_params` have the ticket, as with Dynamo's vLLM workers."""


class _Stop(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None


class _Sampling(msgspec.Struct, frozen=True):
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


class _Output(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class _PrefillResult(msgspec.Struct, frozen=True):
    disaggregated_params: dict[str, Any] | None = None


class WorkerRequest(msgspec.Struct):
    """The fields of a request of Dynamo's frontend (`PreprocessedRequest`) that are read."""

    token_ids: list[int]
    stop_conditions: _Stop = _Stop()
    sampling_options: _Sampling = _Sampling()
    output_options: _Output = _Output()
    prefill_result: _PrefillResult | None = None


def engine_request(message: Mapping[str, Any], engine: EngineClient, *, is_prefill: bool) -> Request:
    """The request for `engine`, kvferry's. `is_prefill`: the request is handed off after its
    prefill. Raises `InvalidRequest`."""
    try:
        worker_request = msgspec.convert(message, WorkerRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request cannot be read: {error}") from error
    stop, options, num = worker_request.stop_conditions, worker_request.sampling_options, len(worker_request.token_ids)
    if not num or not are_tokens(worker_request.token_ids, engine.vocab_size):
        raise InvalidRequest("token_ids must be at least one id of the model's vocabulary", param="token_ids")
    if num >= engine.max_model_len:
        raise ContextLengthExceeded(f"{num} tokens leave no room in a context of {engine.max_model_len}")
    if options.n not in (None, 1):
        raise InvalidRequest("n must be 1: kvferry's engine gives one answer to a request of Dynamo", param="n")
    room = engine.max_model_len - num
    values = {name: value for name, value in msgspec.to_builtins(options).items() if value is not None and name != "n"}
    sampling = SamplingParams(
        **{**engine.default_sampling, "seed": entropy.token_bits(63), **values},
        max_tokens=1 if is_prefill else min(room, stop.max_tokens or room),
        min_tokens=0 if is_prefill else stop.min_tokens or 0,
        ignore_eos=bool(stop.ignore_eos),
        stop_token_ids=tuple({*(stop.stop_token_ids or ()), *(stop.stop_token_ids_hidden or ())}),
        logprobs=worker_request.output_options.logprobs,
        prompt_logprobs=worker_request.output_options.prompt_logprobs,
    )
    sampling.validate()
    name = entropy.token_hex(16)
    return Request(
        request_id=f"dynamo-{name}",
        prompt_token_ids=worker_request.token_ids,
        sampling=sampling,
        hand_off=Produce(name) if is_prefill else _received_hand_off(worker_request),
    )


def _received_hand_off(worker_request: WorkerRequest) -> HandOff:
    params = worker_request.prefill_result.disaggregated_params if worker_request.prefill_result else None
    ticket = (params or {}).get(TICKET)
    return parse_hand_off(ticket, "") if isinstance(ticket, dict) else None


def worker_output(output: EngineOutput) -> dict[str, Any]:
    """One output of the engine in the form that Dynamo's frontend reads."""
    delta: dict[str, Any] = {"token_ids": output.token_ids}
    if output.logprobs:
        delta["log_probs"] = [token.logprob for token in output.logprobs]
        delta["top_logprobs"] = [_top(token) for token in output.logprobs]
    if output.finish_reason is not None:
        delta["finish_reason"] = {"stop": "stop", "length": "length"}.get(output.finish_reason, "cancelled")
    if output.kv_transfer_params is not None:
        delta["disaggregated_params"] = {TICKET: output.kv_transfer_params}
    return delta


def _top(token: TokenLogprobs) -> list[dict[str, Any]]:
    likely = {**token.top, token.token_id: token.logprob}
    return [
        {"token_id": token_id, "logprob": value, "rank": rank}
        for rank, (token_id, value) in enumerate(likely.items(), 1)
    ]


class EngineWorker:
    """One engine at one endpoint of Dynamo. `unregister_timeout_s`: maximum seconds to unregister from Dynamo's
    discovery at the end."""

    def __init__(
        self, engine: EngineClient, endpoint: DynamoEndpoint, model: str, *, unregister_timeout_s: float = 5.0
    ) -> None:
        self._engine, self._endpoint, self._model, self._unregister_timeout_s = (
            engine,
            endpoint,
            model,
            unregister_timeout_s,
        )
        self._prefills = engine.describe().role == "prefill"

    async def run(self) -> None:
        """Serve until cancelled. Raises `MissingDependency`."""
        runtime = DynamoRuntime()
        endpoint = runtime.endpoint(self._endpoint)
        try:
            await runtime.register_model(endpoint, self._model, self._engine.describe())
            logger.info("registered in Dynamo's discovery as %s", self._endpoint.path)
            await endpoint.serve_endpoint(self.generate)
        finally:
            with suppress(Exception):  # the runtime raises bare Exceptions; it is closed anyway
                async with asyncio.timeout(self._unregister_timeout_s):
                    await endpoint.unregister_endpoint_instance()
            runtime.close()

    async def generate(self, message: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any]]:
        """Answer one request. Dynamo calls this; an exception becomes the request's error in Dynamo."""
        from dynamo._core import InvalidArgument

        try:
            request = engine_request(message, self._engine, is_prefill=self._prefills)
            outputs = cast(AsyncGenerator[EngineOutput], self._engine.generate(request))
            async with aclosing(outputs):
                async for output in _until_stopped(outputs, context):
                    yield worker_output(output)
        except InvalidRequest as error:
            raise InvalidArgument(error.message) from error
        except RequestError as error:
            raise RuntimeError(f"{type(error).__name__}: {error.message}") from error


async def _until_stopped(outputs: AsyncIterator[EngineOutput], context: Any) -> AsyncIterator[EngineOutput]:
    """The outputs, until the frontend stops the request."""
    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    try:
        while True:
            next_output = asyncio.ensure_future(anext(outputs, None))
            await asyncio.wait([next_output, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not next_output.done():
                next_output.cancel()
                await asyncio.wait([next_output])
                return
            if (output := next_output.result()) is None:
                return
            yield output
    finally:
        stopped.cancel()
