"""The routes that generate: decode a request, run it, and send the answer whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from kvferry.api.decoding import Decoded
from kvferry.api.fields import WARNING_HEADER, warning_of
from kvferry.api.other_fields import refuse_unsupported
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvferry.core.errors import RequestError
from kvferry.core.messages.continuation import PROGRESS_HEADER
from kvferry.core.messages.openai import REQUEST_ID_HEADER, TIMELINE_HEADER, sane_request_id
from kvferry.engine.server.assembly import Delta, merge_deltas
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.parameters import refused_hand_off
from kvferry.engine.server.planning import Plan, plan_request, timeline_of
from kvferry.engine.server.prompts import echoes_of
from kvferry.engine.server.streaming import DeltaBatches, EventStream, ProgressMarks
from kvferry.engine.server.text_codec import THREAD_ABOVE_TOKENS
from kvferry.engine.server.thread_offload import ThreadOffload
from kvferry.engine.server.writing import AnswerWriter, ChatWriter, CompletionWriter
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response

Body = TypeVar("Body", bound=msgspec.Struct)
GenerationBody = TypeVar("GenerationBody", bound=GenerationRequest)

logger = logging.getLogger(__name__)

_NO_CALLS = "no parser of this model's tool calls is known; calls that it writes stay text in content"
_NO_REASONING = "no parser of this model's reasoning is known; no part of its answer counts as reasoning"

MakeWriter = Callable[..., Awaitable[AnswerWriter]]


class GenerationRoute(Generic[GenerationBody]):
    """One generating route. Request, generation and answer are one task, so that they end together."""

    def __init__(
        self, context: ServerContext, body_type: type[GenerationBody], id_prefix: str, make_writer: MakeWriter
    ) -> None:
        self._context = context
        self._body_type = body_type
        self._id_prefix = id_prefix
        self._make_writer = make_writer

    async def handle(self, request: HttpRequest, response: Response) -> None:
        await self.answer(request, response, await request.body.read())

    async def answer(self, request: HttpRequest, response: Response, raw: bytes) -> None:
        """Answer a request with this body."""
        arrived = self._context.clock.wall()
        decoded = await decode(self._context, request, response, raw, self._body_type)
        body = decoded.body
        try:
            refuse_unsupported(decoded.unsupported)
            writer = await self._prepare(request, body, arrived)
        except RequestError:
            if (hand_off := refused_hand_off(body)) is not None:
                self._context.engine_client.refused(hand_off)
            raise
        thread_offload = self._context.codec.thread_offload
        if not body.stream:
            await _send_response(writer, thread_offload, response)
            return
        marks = None
        if request.header(PROGRESS_HEADER) is not None and self._is_continuable(writer, body):
            marks = ProgressMarks(writer.generation, writer.created)
            response.add_header(PROGRESS_HEADER.lower().encode(), b"1")
        batches = DeltaBatches(body.stream_interval or 1, self._context.clock)
        await _send_stream(writer, thread_offload, response, batches, marks)

    def _is_continuable(self, writer: AnswerWriter, body: GenerationBody) -> bool:
        children = writer.generation.children
        sampling = children[0].request.sampling
        return len(children) == 1 and self._context.engine_client.continues(sampling, is_seeded=body.seed is not None)

    async def _prepare(self, request: HttpRequest, body: GenerationBody, arrived: float) -> AnswerWriter:
        model = self._context.require_model(body.model)
        if body.request_id is not None and request.header(REQUEST_ID_HEADER) is None:
            request.id = sane_request_id(body.request_id)
        answer_id = self._id_prefix + request.id
        timeline = timeline_of(request.header(TIMELINE_HEADER), arrived)
        plan = await plan_request(self._context, body, answer_id, timeline)
        created = int(arrived) if plan.continuation is None else plan.continuation.created
        return await self._make_writer(self._context, body, plan, answer_id=answer_id, model=model, created=created)


def completions_route(context: ServerContext) -> GenerationRoute[CompletionRequest]:
    """`POST /v1/completions`."""

    async def make_writer(context: ServerContext, body: CompletionRequest, plan: Plan, **head: Any) -> AnswerWriter:
        if not body.echo:
            return CompletionWriter(body, plan, context.token_texts, **head)
        skip_special_tokens = body.skip_special_tokens is not False
        echoes = await echoes_of(plan.prompts, context.codec, skip_special_tokens=skip_special_tokens)
        return CompletionWriter(body, plan, context.token_texts, echoes, **head)

    return GenerationRoute(context, CompletionRequest, "cmpl-", make_writer)


def chat_route(context: ServerContext) -> GenerationRoute[ChatCompletionRequest]:
    """`POST /v1/chat/completions`."""

    async def make_writer(context: ServerContext, body: ChatCompletionRequest, plan: Plan, **head: Any) -> AnswerWriter:
        (prompt,), prompt_text = plan.prompts, None
        if body.return_prompt_text:
            prompt_text = prompt.text
            if prompt_text is None:  # the prompt was truncated
                prompt_text = await context.codec.decode(prompt.token_ids, skip_special_tokens=False)
        return ChatWriter(body, plan, context.token_texts, prompt_text, **head)

    return GenerationRoute(context, ChatCompletionRequest, "chatcmpl-", make_writer)


async def decode(
    context: ServerContext, request: HttpRequest, response: Response, raw: bytes, body_type: type[Body]
) -> Decoded[Body]:
    """The body as `body_type`. The answer gets a warning header if fields have no effect: unknown ones, tools without a
    parser of tool calls, and a thinking budget without a parser of reasoning. Raises `InvalidRequest`."""
    decoded = await context.decode(raw, request, body_type)
    ignored = warning_of(decoded.ignored)
    warnings = [*([] if ignored is None else [ignored]), *_warnings_of_chat(context, decoded.body)]
    if warnings:
        response.add_header(WARNING_HEADER.lower().encode(), "; ".join(warnings).encode("latin-1", "replace"))
    return decoded


def _warnings_of_chat(context: ServerContext, body: msgspec.Struct) -> list[str]:
    if not isinstance(body, ChatCompletionRequest):
        return []
    warnings, budget = [], body.thinking_token_budget
    if context.parsers.tools is None and body.tool_use().mode == "auto":
        _log_once("tools", _NO_CALLS, "--tool-call-parser")
        warnings.append(f"tools: {_NO_CALLS}")
    if context.parsers.reasoning is None and budget is not None and budget != -1:
        _log_once("thinking_token_budget", _NO_REASONING, "--reasoning-parser")
        warnings.append(f"thinking_token_budget: {_NO_REASONING}")
    return warnings


@cache
def _log_once(field: str, reason: str, flag: str) -> None:
    """Log the warning once per process."""
    logger.warning("a request has %s: %s. %s names one", field, reason, flag)


async def _send_response(writer: AnswerWriter, thread_offload: ThreadOffload, response: Response) -> None:
    deltas: list[list[Delta]] = [[] for _ in writer.generation.children]

    async def keep(delta: Delta) -> None:
        deltas[delta.index].append(delta)

    await writer.generation.run(keep)
    choices = [merge_deltas(parts) for parts in deltas]
    answer = await thread_offload.run_if(
        _is_large(*choices), lambda: msgspec.json.encode(writer.full_response(choices))
    )
    response.send_json(answer)


def _is_large(*deltas: Delta) -> bool:
    """True if the deltas have so many tokens that encoding them takes long."""
    num_tokens = 0
    for delta in deltas:
        num_tokens += len(delta.token_ids) + len(delta.prompt_logprobs or ())
    return num_tokens > THREAD_ABOVE_TOKENS


async def _send_stream(
    writer: AnswerWriter,
    thread_offload: ThreadOffload,
    response: Response,
    batches: DeltaBatches,
    marks: ProgressMarks | None = None,
) -> None:
    stream = EventStream(response)

    async def send(delta: Delta) -> None:
        # Called for every token: avoids awaits.
        batch = batches.add(delta)
        if batch is None:
            return
        delta = batch
        events = await thread_offload.run_if(True, writer.events, delta) if _is_large(delta) else writer.events(delta)
        stream.write(events, () if marks is None else marks.of(delta, len(events)))
        if response.slow:
            await response.drain()

    await writer.generation.run(send)
    stream.write(writer.last_events())
    stream.close()
