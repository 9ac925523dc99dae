"""The state that all routes of one server share."""

from __future__ import annotations

from kvferry.api.decoding import THREAD_ABOVE_BYTES, Body, Decoded, decode_body, require_json
from kvferry.api.requests import ChatCompletionRequest
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import UnknownModel
from kvferry.engine.overrides import parse_template_kwargs
from kvferry.engine.server.chat_template import render_chat
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.engine_protocol import EngineClient
from kvferry.engine.server.grammars import make_compiler
from kvferry.engine.server.output_parsers.table import OutputParsers
from kvferry.engine.server.prompts import Prompt, require_encodable
from kvferry.engine.server.text_codec import TextCodec, TokenTexts
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.request import HttpRequest
from kvferry.observe.metrics import EngineMetrics


class ServerContext:
    """One engine, and the server's own objects for it. `seed`: for requests without one; None: a random one for
    each."""

    def __init__(
        self, engine_client: EngineClient, config: ServerConfig, *, seed: int | None = None, clock: Clock | None = None
    ) -> None:
        self.engine_client = engine_client
        self.config = config
        self.seed = seed
        self.clock = clock or SYSTEM_CLOCK
        self.codec = TextCodec(engine_client.tokenizer)
        self.token_texts = TokenTexts(self.codec.backend)
        kwargs = config.default_chat_template_kwargs
        self._template_defaults = {} if kwargs is None else parse_template_kwargs(kwargs)
        self.parsers = OutputParsers(
            engine_client.tokenizer, tools=config.tool_call_parser, reasoning=config.reasoning_parser
        )
        self.grammars = make_compiler(engine_client.tokenizer, engine_client.vocab_size, engine_client.eos_token_ids)
        self.lifecycle = Lifecycle()
        self.metrics = EngineMetrics(engine_client.model_names[0])

    def require_model(self, name: str | None) -> str:
        """The model name for the answer: the request's, or the first one if it has none. Raises `UnknownModel`."""
        if name is not None and name not in self.engine_client.model_names:
            raise UnknownModel(f"The model `{name}` does not exist.", param="model")
        return self.engine_client.model_names[0] if name is None else name

    async def decode(self, raw: bytes, request: HttpRequest, body_type: type[Body]) -> Decoded[Body]:
        """A request body as `body_type`. Raises `InvalidRequest`."""
        require_json(request.header("content-type"), request.header("content-encoding"))
        return await self.codec.off_loop.run_if(len(raw) > THREAD_ABOVE_BYTES, decode_body, raw, body_type)

    async def chat_prompt(self, body: ChatCompletionRequest) -> Prompt:
        """The messages as tokens. Templates write special tokens themselves, so none are added unless the request
        says so. Raises `InvalidRequest`."""
        text = await render_chat(body, self.codec, self._template_defaults)
        truncated = body.truncate_prompt_tokens is not None
        await require_encodable(text, self.codec, self.engine_client.max_model_len, "messages", truncated=truncated)
        return Prompt(await self.codec.encode(text, add_special_tokens=bool(body.add_special_tokens)), text)
