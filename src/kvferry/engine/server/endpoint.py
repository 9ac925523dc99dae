"""A generating route from the first byte of its request to the last of its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.api.fields import WARNING_HEADER, warning_of
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvferry.core.errors import InvalidRequest
from kvferry.core.openai import BodyTooLarge, error_envelope, sane_request_id
from kvferry.engine.server.assembly import Delta, joined
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.errors import client_error
from kvferry.engine.server.lifecycle import while_connected
from kvferry.engine.server.planning import Plan, plan_request, timeline_of
from kvferry.engine.server.prompts import echoes_of
from kvferry.engine.server.streaming import EventStream
from kvferry.engine.server.writing import AnswerWriter, ChatWriter, CompletionWriter

Body = TypeVar("Body", bound=msgspec.Struct)
GenerationBody = TypeVar("GenerationBody", bound=GenerationRequest)

MakeWriter = Callable[..., Awaitable[AnswerWriter]]


class GenerationRoute(Generic[GenerationBody]):
    """An ASGI application: one route that generates. Request, generation and answer share one task, so that whatever
    ends one ends all."""

    def __init__(
        self, context: ServerContext, body_type: type[GenerationBody], id_prefix: str, make_writer: MakeWriter
    ) -> None:
        self._context = context
        self._body_type = body_type
        self._id_prefix = id_prefix
        self._make_writer = make_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = self._context.clock.wall()
        request = Request(scope, receive)
        self._context.lifecycle.require_accepting()
        raw = await read_body(request, self._context.config.max_body_bytes)
        async with while_connected(receive):
            body = await decode(self._context, request, raw, self._body_type)
            writer = await self._prepare(request, body, arrived)
            if body.stream:
                await _send_stream(writer, send, request.state.request_id)
            else:
                await _send_whole(writer, scope, receive, send)

    async def _prepare(self, request: Request, body: GenerationBody, arrived: float) -> AnswerWriter:
        model = self._context.require_model(body.model)
        if "x-request-id" not in request.headers and body.request_id is not None:
            request.state.request_id = sane_request_id(body.request_id)
        answer_id = self._id_prefix + request.state.request_id
        timeline = timeline_of(request.headers, arrived)
        plan = await plan_request(self._context, body, answer_id, timeline)
        return await self._make_writer(
            self._context, body, plan, answer_id=answer_id, model=model, created=int(arrived)
        )


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
        return ChatWriter(body, plan, context.token_texts, **head)

    return GenerationRoute(context, ChatCompletionRequest, "chatcmpl-", make_writer)


async def decode(context: ServerContext, request: Request, raw: bytes, body_type: type[Body]) -> Body:
    """The body as `body_type`; the answer will have a header that names fields without effect."""
    decoded = await context.decode(raw, request.headers, body_type)
    if (warning := warning_of(decoded.ignored)) is not None:
        request.state.extra_headers = {WARNING_HEADER: warning}
    return decoded.body


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body. Raises `BodyTooLarge` without reading more than `most_bytes`."""
    told = request.headers.get("content-length", "0")
    if not told.isdecimal():
        raise InvalidRequest("the Content-Length header is not a number")
    if int(told) > most_bytes:
        raise BodyTooLarge(f"the body has {told} bytes; at most {most_bytes} are accepted")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise BodyTooLarge(f"the body has more than {most_bytes} bytes, which is the most accepted")
    return bytes(body)


async def _send_whole(writer: AnswerWriter, scope: Scope, receive: Receive, send: Send) -> None:
    deltas: list[list[Delta]] = [[] for _ in writer.generation.children]

    async def keep(delta: Delta) -> None:
        deltas[delta.index].append(delta)

    await writer.generation.run(keep)
    answer = writer.whole([joined(parts) for parts in deltas])
    await Response(msgspec.json.encode(answer), media_type="application/json")(scope, receive, send)


async def _send_stream(writer: AnswerWriter, send: Send, request_id: str) -> None:
    stream = EventStream(send)
    try:
        await writer.generation.run(lambda delta: stream.write(writer.events(delta)))
        await stream.write(writer.last_events())
    except Exception as error:
        if not stream.started:
            raise
        # The status is sent already; the client's library knows an error event for what it is.
        await stream.write_error(error_envelope(client_error(error, request_id)))
    await stream.close()
