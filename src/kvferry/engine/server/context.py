"""The state that all routes of one server share, with the compiled constraints of requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvferry.api.decoding import THREAD_ABOVE_BYTES, Body, Decoded, decode_body, require_json
from kvferry.api.requests import ChatCompletionRequest
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import InvalidRequest, MissingDependency, UnknownModel, UnsupportedModel
from kvferry.core.structured_outputs import Grammar, GrammarBackend, Matcher, StructuredOutputs
from kvferry.engine.overrides import parse_template_kwargs
from kvferry.engine.server.chat_template import render_chat
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.engine_protocol import EngineClient
from kvferry.engine.server.output_parsers.table import OutputParsers
from kvferry.engine.server.prompts import Prompt, require_encodable
from kvferry.engine.server.text_codec import TextCodec, TokenTexts
from kvferry.engine.server.thread_offload import ThreadOffload
from kvferry.engine.structured.library import require_llguidance
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.request import HttpRequest
from kvferry.observe.metrics import EngineMetrics


class GrammarCompiler:
    """Compiles the constraints of requests for a server, off its event loop, and caches them. Owns the cache and the
    queue of compilations. One that takes too long is refused; its thread ends by the limits of llguidance.

    `make_backend`: called in a thread for the first constraint, as it takes about a second for a vocabulary of 131,072
    tokens. `max_grammars` bounds the cache, `max_waiting` the queue, and `timeout_s` the wait for a compilation, which
    goes on at a low priority after `normal_s` seconds, as the engine may need its core.
    """

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        *,
        max_grammars: int = 64,
        max_waiting: int = 64,
        timeout_s: float = 10.0,
        normal_s: float = 0.05,
    ) -> None:
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._max_grammars = max_grammars
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._backend_lock, self._lock = threading.Lock(), threading.Lock()
        self._threads = ThreadOffload(max_waiting=max_waiting, timeout_s=timeout_s, purpose="compiled")
        self._compilations = ThreadOffload(
            max_waiting=max_waiting, timeout_s=timeout_s, purpose="compiled", normal_s=normal_s
        )

    async def matchers(self, constraint: StructuredOutputs, number: int, tokens: Sequence[int] = ()) -> list[Matcher]:
        """As many states of the constraint after these tokens of the answer. Raises `InvalidRequest`, `GrammarFailed`,
        and `QueueFull` or `Unavailable` if compiling must wait for too long."""
        grammar = await self._grammar(constraint)
        return await self._threads.run_if(bool(tokens), lambda: [grammar.matcher(tokens) for _ in range(number)])

    async def _grammar(self, constraint: StructuredOutputs) -> Grammar:
        if (grammar := self._cached(constraint)) is not None:
            return grammar
        try:
            backend = await self._threads.run_if(self._backend is None, self._get_backend)
        except (MissingDependency, UnsupportedModel) as error:
            raise InvalidRequest(f"{constraint.field}: {error}", param=constraint.field) from error
        return await self._compilations.run_if(True, self._compile, backend, constraint)

    def _compile(self, backend: GrammarBackend, constraint: StructuredOutputs) -> Grammar:
        """Compile and cache it, also for a request that is gone by then."""
        if (grammar := self._cached(constraint)) is not None:
            return grammar  # compiled while this request waited for its turn
        grammar = backend.compile(constraint)
        with self._lock:
            self._grammars[constraint.digest] = grammar
            while len(self._grammars) > self._max_grammars:
                self._grammars.popitem(last=False)
        return grammar

    def _cached(self, constraint: StructuredOutputs) -> Grammar | None:
        with self._lock:
            if (grammar := self._grammars.get(constraint.digest)) is not None:
                self._grammars.move_to_end(constraint.digest)
            return grammar

    def _get_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend


def make_compiler(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> GrammarCompiler:
    """The compiler of a server. Where llguidance is not installed or cannot read the tokenizer, it refuses each
    constraint with the reason."""

    def make_backend() -> GrammarBackend:
        require_llguidance()
        from kvferry.engine.structured.llguidance_backend import LlguidanceBackend  # an extra

        try:
            return LlguidanceBackend(tokenizer, vocab_size, sorted(eos_token_ids))
        except Exception as error:
            raise UnsupportedModel(f"llguidance cannot read this model's tokenizer: {error}") from error

    return GrammarCompiler(make_backend)


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
        return await self.codec.thread_offload.run_if(len(raw) > THREAD_ABOVE_BYTES, decode_body, raw, body_type)

    async def chat_prompt(self, body: ChatCompletionRequest) -> Prompt:
        """The messages as tokens. Templates write special tokens themselves, so none are added unless the request
        says so. Raises `InvalidRequest`."""
        text = await render_chat(body, self.codec, self._template_defaults)
        truncated = body.truncate_prompt_tokens is not None
        await require_encodable(text, self.codec, self.engine_client.max_model_len, "messages", truncated=truncated)
        return Prompt(await self.codec.encode(text, add_special_tokens=bool(body.add_special_tokens)), text)
