"""Runs the sequences of one HTTP request in the engine, all at once, and counts their tokens.

The end of a run (also an error, a disconnect or the server's shutdown) closes every engine iterator, which frees the
sequence's resources.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kvferry.api import answers
from kvferry.core.clock import Clock
from kvferry.core.errors import RequestError, Unavailable
from kvferry.core.messages.continuation import answer_name
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import sampling_digest
from kvferry.engine.server.assembly import ChoiceAssembler, Delta
from kvferry.engine.server.engine_protocol import EngineClient
from kvferry.observe.metrics import EngineMetrics, RequestTracker

Outputs = AsyncGenerator[EngineOutput, None]

Sink = Callable[[Delta], Awaitable[None]]
"""Takes each delta; called by several tasks in turn, in order for each choice."""


@dataclass
class Child:
    """One sequence. `is_leader`: the first one of its prompt. `waits_for_leader`: it waits until the leader decodes.
    `continued`: another instance began it, so its counts include that part."""

    request: Request
    assembler: ChoiceAssembler
    is_leader: bool
    waits_for_leader: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0
    continued: bool = False


class Generation:
    """The sequences of one request. `run` it once; `usage` counts meanwhile, `ticket` and `timeline` are set at the
    end. `parsers`: the names of the output parsers. `counts_reasoning`: the usage says how many tokens were
    reasoning.

    Only the leader takes part in a hand-off; the other sequences wait until it decodes: by then the instance has the
    prompt's KV for all of them.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        engine_client: EngineClient,
        metrics: EngineMetrics,
        clock: Clock,
        arrived: float,
        parsers: str = "",
        counts_reasoning: bool = False,
    ) -> None:
        self.children = children
        self.num_unfinished = len(children)
        self.ticket: dict[str, Any] | None = None
        self.timeline: dict[str, float] = {}
        self._front = engine_client
        self._metrics = metrics
        self._clock = clock
        self._arrived = arrived
        self._parsers = parsers
        self._counts_reasoning = counts_reasoning
        self._leader_decodes = asyncio.Event()

    @property
    def answer_name(self) -> str:
        """The name of the first sequence's answer, which another instance compares before it continues it."""
        request, engine_client = self.children[0].request, self._front
        source = sampling_digest(engine_client.model_identity, request.sampling, engine_client.eos_token_ids)
        return answer_name(
            source, engine_client.eos_token_ids, request.prompt_token_ids, request.cache_salt, self._parsers
        )

    async def run(self, sink: Sink) -> None:
        """Generate everything, and pass each delta to `sink`. Raises `RequestError` if a sequence fails."""
        if len(self.children) == 1:
            await self._pump(self.children[0], sink)
            return
        with _single_error():
            async with asyncio.TaskGroup() as group:
                for child in self.children:
                    group.create_task(self._pump(child, sink))

    def usage(self, index: int | None = None) -> answers.Usage:
        """Number of tokens so far: in the whole request, or in one choice (for `continuous_usage_stats`)."""
        if index is None:
            leaders, answer_children = [child for child in self.children if child.is_leader], self.children
        else:
            leaders = answer_children = [self.children[index]]
        num_prompt = sum(len(child.request.prompt_token_ids) for child in leaders)
        num_answer = sum(child.num_tokens for child in answer_children)
        return answers.Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_answer,
            total_tokens=num_prompt + num_answer,
            prompt_tokens_details=answers.PromptTokensDetails(sum(child.num_cached_tokens for child in leaders)),
            completion_tokens_details=self._details(answer_children),
        )

    def _details(self, children: Sequence[Child]) -> answers.CompletionTokensDetails | None:
        if not self._counts_reasoning:
            return None
        return answers.CompletionTokensDetails(sum(child.assembler.num_reasoning_tokens for child in children))

    async def _pump(self, child: Child, sink: Sink) -> None:
        if child.waits_for_leader:
            await self._leader_decodes.wait()
        with self._metrics.track(len(child.request.prompt_token_ids), self._arrived, self._clock) as tracker:
            last = await self._until_last(child, sink, tracker)
            tracker.record_end(last.finish_reason or "stop", child.request.timeline)
        self.num_unfinished -= 1
        await sink(last)

    async def _until_last(self, child: Child, sink: Sink, tracker: RequestTracker) -> Delta:
        """The choice's last delta, after the engine's iterator is closed: a stop string ends it before the engine
        does."""
        async with aclosing(cast(Outputs, self._front.generate(child.request))) as outputs:
            async for output in outputs:
                _raise_failure(output)
                tracker.record_tokens(len(output.token_ids))
                delta = child.assembler.feed(output)
                self._record(child, output, delta)
                if delta.finish_reason is not None:
                    return delta
                await sink(delta)
        raise Unavailable("the engine ended the request without an answer")

    def _record(self, child: Child, output: EngineOutput, delta: Delta) -> None:
        child.num_tokens += len(delta.token_ids)
        if child.num_tokens > 1 or delta.finish_reason is not None:
            self._leader_decodes.set()  # the first token came with the ticket, before any KV
        if not child.continued:
            child.num_cached_tokens = output.num_cached_tokens
        if output.timeline is not None:
            child.request.timeline = output.timeline
        if delta.finish_reason is None:
            return
        child.request.timeline.stamp("done", self._clock.wall())  # a stop string ends it before the engine does
        if child is self.children[0]:
            self.ticket = output.kv_transfer_params
            self.timeline = msgspec.to_builtins(child.request.timeline)


@contextmanager
def _single_error() -> Iterator[None]:
    """Raise one error instead of a task group's exception group: a `RequestError` if there is one."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        raise next((leaf for leaf in leaves if isinstance(leaf, RequestError)), leaves[0]) from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _raise_failure(output: EngineOutput) -> None:
    if output.finish_reason == "abort":
        raise Unavailable("the engine aborted the request")
    if output.finish_reason != "error":
        return
    if isinstance(output.error, RequestError):
        raise output.error
    raise RuntimeError(f"the engine failed on request {output.request_id}") from output.error
