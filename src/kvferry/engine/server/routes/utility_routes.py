"""The routes that do not generate: models, tokenization, health, metrics, and kvferry's own."""

from __future__ import annotations

from contextlib import suppress

import msgspec

import kvferry
from kvferry.api import answers
from kvferry.api.decoding import read_fields
from kvferry.api.openapi import OPENAPI_PATH, openapi_document
from kvferry.api.requests import (
    AbortRequest,
    DetokenizeRequest,
    KeptRequest,
    ReleaseRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from kvferry.core.errors import InvalidRequest, LeakError, RequestError, Unavailable
from kvferry.core.request import Request as EngineRequest
from kvferry.core.sampling import SamplingParams
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.prompts import require_encodable, require_known_tokens
from kvferry.engine.server.routes.endpoint import Body, decode
from kvferry.engine.statistics import EngineSnapshot
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route


class _Leaked(RequestError):
    """500: `check` found a resource that was not released."""

    kind = "leak_error"
    code = "leak"


class UtilityRoutes:
    """One method for each route."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._created = int(context.clock.wall())

    def routes(self) -> list[Route]:
        """All routes, with the access that each requires (`Access`)."""
        return [
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/*", self.model),
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/v1/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
            Route("POST", "/v1/detokenize", self.detokenize),
            Route("GET", "/tokenizer_info", self.tokenizer_info),
            Route("GET", "/health", self.health, "open"),
            Route("GET", "/ping", self.health, "open"),
            Route("POST", "/ping", self.health, "open"),
            Route("GET", "/load", self.load),
            Route("GET", "/server_info", self.server_info, "probe"),
            Route("POST", "/reset_prefix_cache", self.reset_prefix_cache, "operate"),
            Route("POST", "/abort_requests", self.abort_requests, "operate"),
            Route("GET", "/version", self.version, "open"),
            Route("GET", OPENAPI_PATH, self.openapi, "open"),
            Route("GET", "/metrics", self.metrics, "probe"),
            Route("POST", "/kvferry/release", self.release, "release"),
            Route("POST", "/kvferry/kept", self.stored_blocks, "operate"),
            Route("GET", "/kvferry/instance", self.instance, "probe"),
            Route("GET", "/kvferry/check", self.check, "probe"),
        ]

    async def models(self, request: HttpRequest, response: Response) -> None:
        """The names of the model."""
        send_json(
            response, answers.ModelList(data=[self._card(name) for name in self._context.engine_client.model_names])
        )

    async def model(self, request: HttpRequest, response: Response) -> None:
        """One name of the model; 404 if it is not served."""
        send_json(response, self._card(self._context.require_model(request.rest)))

    def _card(self, name: str) -> answers.Model:
        engine_client = self._context.engine_client
        return answers.Model(
            id=name, created=self._created, root=engine_client.model_names[0], max_model_len=engine_client.max_model_len
        )

    async def tokenize(self, request: HttpRequest, response: Response) -> None:
        """The tokens of a text or of messages, as the generating routes compute them."""
        await self.send_tokens(request, response, await request.body.read())

    async def send_tokens(self, request: HttpRequest, response: Response, raw: bytes) -> None:
        """Answer a request to tokenize that has this body."""
        if b'"messages"' in raw and "messages" in read_fields(raw):
            chat = (await decode(self._context, request, response, raw, TokenizeChatRequest)).body
            self._context.require_model(chat.model)
            token_ids = (await self._context.chat_prompt(chat)).token_ids
            await self._send_tokens(response, token_ids, bool(chat.return_token_strs))
            return
        body = (await decode(self._context, request, response, raw, TokenizeCompletionRequest)).body
        self._context.require_model(body.model)
        codec, max_model_len = self._context.codec, self._context.engine_client.max_model_len
        await require_encodable(body.prompt, codec, max_model_len, "prompt")
        token_ids = await codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        await self._send_tokens(response, token_ids, bool(body.return_token_strs))

    async def _send_tokens(self, response: Response, token_ids: list[int], with_strings: bool) -> None:
        strings = await self._context.codec.token_strings(token_ids) if with_strings else None
        send_json(
            response,
            answers.Tokens(
                count=len(token_ids),
                max_model_len=self._context.engine_client.max_model_len,
                tokens=token_ids,
                token_strs=strings,
            ),
        )

    async def detokenize(self, request: HttpRequest, response: Response) -> None:
        """The text of tokens, with special tokens written out."""
        body = await self._decoded(request, response, DetokenizeRequest)
        self._context.require_model(body.model)
        if len(body.tokens) > (max_tokens := self._context.engine_client.max_model_len):
            raise InvalidRequest(
                f"tokens has {len(body.tokens)} ids; at most {max_tokens} are accepted, the model's context",
                param="tokens",
            )
        require_known_tokens(body.tokens, self._context.codec.vocab_size, "tokens")
        text = await self._context.codec.decode(body.tokens, skip_special_tokens=False)
        send_json(response, answers.Detokenized(prompt=text))

    async def health(self, request: HttpRequest, response: Response) -> None:
        """200 while requests can be served, otherwise 503; with the engine's id, by which a router detects a new
        process."""
        if not self._context.engine_client.healthy:
            raise Unavailable("the engine is not healthy")
        response.send_json(msgspec.json.encode({"status": "ok", "engine_id": self._context.engine_client.engine_id}))

    async def load(self, request: HttpRequest, response: Response) -> None:
        """The number of requests that run or wait."""
        statistics = await self._context.engine_client.statistics()
        number = statistics.scheduler.num_running + statistics.num_requests_waiting()
        response.send_json(msgspec.json.encode({"server_load": number}))

    async def server_info(self, request: HttpRequest, response: Response) -> None:
        """The version, and the description of this instance for routers (`InstanceFacts`)."""
        facts = self._context.engine_client.describe()
        response.send_json(msgspec.json.encode({"kvferry_version": kvferry.__version__, "instance": facts}))

    async def tokenizer_info(self, request: HttpRequest, response: Response) -> None:
        """The tokenizer's class, special tokens and chat template."""
        tokenizer = self._context.codec.tokenizer
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        response.send_json(
            msgspec.json.encode(
                {
                    "tokenizer_class": type(tokenizer).__name__,
                    "vocab_size": self._context.codec.vocab_size,
                    "model_max_length": self._context.engine_client.max_model_len,
                    "chat_template": tokenizer.chat_template,
                    **special,
                }
            )
        )

    async def reset_prefix_cache(self, request: HttpRequest, response: Response) -> None:
        """Evict all cached blocks that no request uses. `success` is false if some are in use. Raises `InvalidRequest`
        for vLLM's options, which this engine does not have."""
        for name in ("reset_running_requests", "reset_external"):
            if request.parameter(name, "false").lower() not in ("false", "0"):
                raise InvalidRequest(f"{name} is not supported by this server", param=name)
        success = await self._context.engine_client.reset_prefix_cache()
        response.send_json(msgspec.json.encode({"success": success}))

    async def abort_requests(self, request: HttpRequest, response: Response) -> None:
        """End running requests: those in `request_ids`, or all of them."""
        body = await self._decoded(request, response, AbortRequest)
        aborted = self._context.engine_client.abort_requests(body.request_ids or [])
        response.send_json(msgspec.json.encode({"aborted": aborted}))

    async def metrics(self, request: HttpRequest, response: Response) -> None:
        """`GET /metrics`, in the format that the scraper accepts."""
        statistics: EngineSnapshot | None = None
        with suppress(Unavailable):
            statistics = await self._context.engine_client.statistics()
        content, content_type = self._context.metrics.exposition(statistics, request.header("accept") or "")
        response.send(200, content, [(b"content-type", content_type.encode())])

    async def openapi(self, request: HttpRequest, response: Response) -> None:
        """The OpenAPI document of all routes."""
        response.send_json(openapi_document())

    async def version(self, request: HttpRequest, response: Response) -> None:
        """The version of kvferry."""
        response.send_json(msgspec.json.encode({"version": kvferry.__version__}))

    async def release(self, request: HttpRequest, response: Response) -> None:
        """End the lease of a hand-off that will not be fetched."""
        body = await self._decoded(request, response, ReleaseRequest)
        released = await self._context.engine_client.release(body.transfer_id)
        response.send_json(msgspec.json.encode({"released": released}))

    async def stored_blocks(self, request: HttpRequest, response: Response) -> None:
        """Count the blocks of a prompt that the KV stores have; pin or unpin them if the request says so."""
        body = await self._decoded(request, response, KeptRequest)
        require_known_tokens(body.tokens, self._context.engine_client.vocab_size, "tokens")
        prompt = EngineRequest(
            request_id="",
            prompt_token_ids=body.tokens,
            sampling=SamplingParams(max_tokens=1),
            cache_salt=body.cache_salt or "",
        )
        send_json(response, await self._context.engine_client.stored_blocks(prompt, pin=body.pin))

    async def instance(self, request: HttpRequest, response: Response) -> None:
        """The description of this instance for routers (`InstanceFacts`): role, names, layout, and the addresses at
        which peers fetch KV."""
        response.send_json(msgspec.json.encode(self._context.engine_client.describe()))

    async def check(self, request: HttpRequest, response: Response) -> None:
        """200 if every resource in use has an owner; otherwise 500 with the name of the one that has none."""
        try:
            await self._context.engine_client.check()
        except LeakError as error:
            raise _Leaked(str(error)) from error
        response.send_json(b'{"ok":true}')

    async def _decoded(self, request: HttpRequest, response: Response, body_type: type[Body]) -> Body:
        return (await decode(self._context, request, response, await request.body.read(), body_type)).body


def send_json(response: Response, body: msgspec.Struct) -> None:
    """Answer 200 with a struct as JSON."""
    response.send_json(msgspec.json.encode(body))
