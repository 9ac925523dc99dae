"""The routes that generate nothing: models, tokens, health, metrics, and kvferry's own."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import kvferry
from kvferry.api import answers
from kvferry.api.decoding import read_fields
from kvferry.api.requests import (
    DetokenizeRequest,
    ReleaseRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from kvferry.core.errors import InvalidRequest, LeakError, RequestError, Unavailable
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.endpoint import Body, decode, read_body
from kvferry.engine.server.engine_statistics import engine_statistics
from kvferry.engine.server.errors import error_response
from kvferry.engine.server.prompts import require_encodable, require_known_tokens


class _Leaked(RequestError):
    """500: `check` found something that nobody gave back."""

    kind = "leak_error"
    code = "leak"


class UtilityRoutes:
    """One method a route."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._created = int(context.clock.wall())

    def routes(self) -> list[Route]:
        """The routes, for the application."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/kvferry/release", self.release, methods=["POST"]),
            Route("/kvferry/instance", self.instance, methods=["GET"]),
            Route("/kvferry/check", self.check, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        """The names the model is served under."""
        return json_response(answers.ModelList(data=[self._card(name) for name in self._context.front.model_names]))

    async def model(self, request: Request) -> Response:
        """One of them."""
        return json_response(self._card(self._context.require_model(request.path_params["name"])))

    def _card(self, name: str) -> answers.Model:
        front = self._context.front
        return answers.Model(
            id=name, created=self._created, root=front.model_names[0], max_model_len=front.max_model_len
        )

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text or of messages, as a generating route would have them."""
        raw = await self._raw(request)
        if b'"messages"' in raw and "messages" in read_fields(raw):
            chat = await decode(self._context, request, raw, TokenizeChatRequest)
            self._context.require_model(chat.model)
            token_ids = (await self._context.chat_prompt(chat)).token_ids
            return await self._tokens(token_ids, bool(chat.return_token_strs))
        body = await decode(self._context, request, raw, TokenizeCompletionRequest)
        self._context.require_model(body.model)
        codec, max_model_len = self._context.codec, self._context.front.max_model_len
        await require_encodable(body.prompt, codec, max_model_len, "prompt")
        token_ids = await codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        return await self._tokens(token_ids, bool(body.return_token_strs))

    async def _tokens(self, token_ids: list[int], with_strings: bool) -> Response:
        strings = await self._context.codec.written(token_ids) if with_strings else None
        return json_response(
            answers.Tokens(
                count=len(token_ids),
                max_model_len=self._context.front.max_model_len,
                tokens=token_ids,
                token_strs=strings,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones written out."""
        body = await self._decoded(request, DetokenizeRequest)
        self._context.require_model(body.model)
        if len(body.tokens) > (most := self._context.front.max_model_len):
            raise InvalidRequest(
                f"tokens has {len(body.tokens)} ids; at most {most} are accepted, the model's context", param="tokens"
            )
        require_known_tokens(body.tokens, self._context.codec.vocab_size, "tokens")
        return json_response(
            answers.Detokenized(prompt=await self._context.codec.decode(body.tokens, skip_special_tokens=False))
        )

    async def health(self, request: Request) -> Response:
        """200 while requests can be served."""
        self._context.lifecycle.require_accepting()
        if not self._context.front.healthy:
            raise Unavailable("the engine is not healthy")
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        try:
            statistics = engine_statistics(await self._context.front.statistics())
        except Unavailable:
            statistics = None
        content, content_type = self._context.metrics.exposition(statistics, request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    async def version(self, request: Request) -> Response:
        """The version of kvferry."""
        return Response(msgspec.json.encode({"version": kvferry.__version__}), media_type="application/json")

    async def release(self, request: Request) -> Response:
        """Nobody will fetch this hand-off: end its lease."""
        body = await self._decoded(request, ReleaseRequest)
        released = await self._context.front.release(body.transfer_id)
        return Response(msgspec.json.encode({"released": released}), media_type="application/json")

    async def instance(self, request: Request) -> Response:
        """What a router should know: role, names, layout, and where peers fetch KV."""
        return Response(msgspec.json.encode(self._context.front.describe()), media_type="application/json")

    async def check(self, request: Request) -> Response:
        """Whether something is kept though no request is left."""
        try:
            await self._context.front.check()
        except LeakError as error:
            return error_response(_Leaked(str(error)))
        return Response(b'{"ok":true}', media_type="application/json")

    async def _decoded(self, request: Request, body_type: type[Body]) -> Body:
        return await decode(self._context, request, await self._raw(request), body_type)

    async def _raw(self, request: Request) -> bytes:
        return await read_body(request, self._context.config.max_body_bytes)


def json_response(body: msgspec.Struct) -> Response:
    """A struct as the body of a 200."""
    return Response(msgspec.json.encode(body), media_type="application/json")
