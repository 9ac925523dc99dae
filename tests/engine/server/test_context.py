"""The compiler of a server: cached, bounded, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.core.errors import InvalidRequest, QueueFull, Unavailable, UnsupportedModel
from kvferry.core.structured_outputs import GrammarBackend, Matcher, StructuredOutputs
from kvferry.engine.server.context import GrammarCompiler, make_compiler


class SlowBackend:
    """Compiles when it may. `compiled`: the constraints that were compiled, in their order."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.compiled: list[str] = []

    def compile(self, constraint: StructuredOutputs) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert self.may_go_on.wait(30)
        self.compiled.append(constraint.content)
        return self

    def matcher(self, tokens: Sequence[int] = ()) -> Any:
        return object()


def regex(content: str) -> StructuredOutputs:
    return StructuredOutputs(kind="regex", content=content)


async def test_each_sequence_has_a_state_of_its_own_and_grammars_are_cached() -> None:
    backend = SlowBackend()
    backend.may_go_on.set()
    compiler = GrammarCompiler(lambda: backend, max_grammars=2)
    matchers: list[Matcher] = await compiler.matchers(regex("a"), 3)
    assert len({id(matcher) for matcher in matchers}) == 3
    for content in ("a", "b", "a", "c", "a", "b"):
        await compiler.matchers(regex(content), 1)
    assert backend.compiled == ["a", "b", "c", "b"]  # b was used least recently when c came


async def test_the_event_loop_goes_on_and_a_slow_compilation_is_given_up() -> None:
    backend = SlowBackend()
    compiler = GrammarCompiler(lambda: backend, timeout_s=0.05)
    with pytest.raises(Unavailable, match="could not be compiled within"):
        await compiler.matchers(regex("a"), 1)
    backend.may_go_on.set()


async def test_the_queue_is_bounded() -> None:
    backend = SlowBackend()
    compiler = GrammarCompiler(lambda: backend, max_waiting=1)
    backend.may_go_on.set()
    await compiler.matchers(regex("first"), 1)
    backend.may_go_on.clear()
    running = [asyncio.create_task(compiler.matchers(regex(str(number)), 1)) for number in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="waiting to be compiled"):
        await compiler.matchers(regex("more"), 1)
    backend.may_go_on.set()
    await asyncio.gather(*running)


async def test_without_a_library_the_reason_is_named() -> None:
    def refuse() -> GrammarBackend:
        raise UnsupportedModel("install it")

    with pytest.raises(InvalidRequest, match="structured_outputs: install it") as caught:
        await GrammarCompiler(refuse).matchers(regex("a"), 1)
    assert caught.value.param == "structured_outputs"


async def test_a_tokenizer_that_cannot_be_read_is_named() -> None:
    class Unreadable(list[int]):
        def __hash__(self) -> int:
            return 1

    with pytest.raises(InvalidRequest, match="tokenizer"):
        await make_compiler(Unreadable(), 10, [0]).matchers(regex("a"), 1)
