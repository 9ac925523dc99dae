"""Compiles the constraints of requests for a server, off its event loop, and caches them.

Owns the cache and the queue of compilations. One that takes too long is refused; its thread ends by the limits of
llguidance.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from kvferry.core.errors import InvalidRequest, MissingDependency
from kvferry.core.structured_outputs import Grammar, GrammarBackend, Matcher, StructuredOutputs
from kvferry.engine.server.thread_offload import ThreadOffload
from kvferry.engine.structured.library import require_llguidance


class GrammarCompiler:
    """The compiled constraints of one server. `max_grammars` bounds the cache, `max_waiting` the queue, and `limit_s`
    the wait for a compilation."""

    def __init__(
        self, backend: GrammarBackend, *, max_grammars: int = 64, max_waiting: int = 64, limit_s: float = 10.0
    ) -> None:
        self._backend = backend
        self._max_grammars = max_grammars
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
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
        grammar = self._backend.compile(constraint)
        with self._lock:
            self._grammars[digest] = grammar
            while len(self._grammars) > self._max_grammars:
                self._grammars.popitem(last=False)
        return grammar


class NoCompiler:
    """In place of a compiler where none can be: refuses every constraint with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def matchers(self, constraint: StructuredOutputs, number: int, tokens: Sequence[int] = ()) -> list[Matcher]:
        """Raises `InvalidRequest`."""
        raise InvalidRequest(f"{constraint.field}: {self._reason}", param=constraint.field)


def make_compiler(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> GrammarCompiler | NoCompiler:
    """The compiler of a server. Takes about a second for a vocabulary of 131,072 tokens; called before it listens."""
    try:
        require_llguidance()
    except MissingDependency as error:
        return NoCompiler(str(error))
    from kvferry.engine.structured.llguidance_backend import LlguidanceBackend  # an extra

    try:
        return GrammarCompiler(LlguidanceBackend(tokenizer, vocab_size, sorted(eos_token_ids)))
    except ValueError as error:
        return NoCompiler(f"llguidance cannot read this model's tokenizer: {error}")
