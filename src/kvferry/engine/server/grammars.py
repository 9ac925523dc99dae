"""Compiles the constraints of requests for a server, off its event loop, and caches them.

Owns the cache and the queue of compilations. One that takes too long is refused; its thread ends by the limits of
llguidance.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvferry.core.errors import InvalidRequest, MissingDependency, UnsupportedModel
from kvferry.core.structured_outputs import Grammar, GrammarBackend, Matcher, StructuredOutputs
from kvferry.engine.server.thread_offload import ThreadOffload
from kvferry.engine.structured.library import require_llguidance


class GrammarCompiler:
    """The compiled constraints of one server. `make_backend`: called in a thread for the first constraint, as it takes
    about a second for a vocabulary of 131,072 tokens. `max_grammars` bounds the cache, `max_waiting` the queue, and
    `limit_s` the wait for a compilation."""

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        *,
        max_grammars: int = 64,
        max_waiting: int = 64,
        limit_s: float = 10.0,
    ) -> None:
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._max_grammars = max_grammars
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._backend_lock, self._lock = threading.Lock(), threading.Lock()
        self._off_loop = ThreadOffload(max_waiting=max_waiting, limit_s=limit_s, purpose="compiled")

    async def matchers(self, constraint: StructuredOutputs, number: int, tokens: Sequence[int] = ()) -> list[Matcher]:
        """As many states of the constraint after these tokens of the answer. Raises `InvalidRequest`, `GrammarFailed`,
        and `QueueFull` or `Unavailable` if compiling must wait for too long."""
        return await self._off_loop.run_if(True, self._matchers, constraint, number, tokens)

    def _matchers(self, constraint: StructuredOutputs, number: int, tokens: Sequence[int]) -> list[Matcher]:
        grammar = self._grammar(constraint)
        return [grammar.matcher(tokens) for _ in range(number)]

    def _grammar(self, constraint: StructuredOutputs) -> Grammar:
        digest = constraint.digest
        with self._lock:
            if (grammar := self._grammars.get(digest)) is not None:
                self._grammars.move_to_end(digest)
                return grammar
        try:
            backend = self._get_backend()
        except (MissingDependency, UnsupportedModel) as error:
            raise InvalidRequest(f"{constraint.field}: {error}", param=constraint.field) from error
        grammar = backend.compile(constraint)
        with self._lock:
            self._grammars[digest] = grammar
            while len(self._grammars) > self._max_grammars:
                self._grammars.popitem(last=False)
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
