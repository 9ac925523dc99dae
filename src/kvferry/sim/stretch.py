"""Batches of decode-only steps of an engine, and of outputs: they make long traces cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvferry.core.request import EngineOutput
from kvferry.engine.core import EngineCore
from kvferry.engine.scheduling.sequence import Sequence as EngineSequence
from kvferry.engine.scheduling.sequence_blocks import SequenceBlocks
from kvferry.sim.loop import Simulation

_BLOCK, _FULL = 0, 1
"""Changes of a sequence in a step: it gets a block before it computes, or has filled one afterwards."""


def decode_at_once(
    engine: EngineCore, number: int, token: Callable[[int, int], int]
) -> list[list[EngineOutput]] | None:
    """Execute the next `number` steps, in all of which the same sequences decode and none ends: tokens, blocks, prefix
    cache and statistics are the same as after single steps. `token`: the token for a seed and a position.

    Returns the outputs of each step. None: nothing was done, because blocks or the token budget may run out, or a
    connector may be involved; then the steps must be executed one by one.
    """
    scheduler, pool = engine.scheduler, engine.pool
    running, size = scheduler.uniform_decodes(), scheduler.limits.block_size
    num_needed = sum(
        sequence.num_blocks_for(sequence.num_computed_tokens + number) - len(sequence.block_ids) for sequence in running
    )
    is_plain = not any(sequence.produces or sequence.request.deadline is not None for sequence in running)
    if num_needed > pool.num_free or len(running) > scheduler.limits.max_num_batched_tokens or not is_plain:
        return None
    blocks, begun = SequenceBlocks(pool, size), [sequence.num_computed_tokens for sequence in running]
    for sequence in running:
        length = len(sequence.tokens)
        sequence.tokens += [token(sequence.seed, index) for index in range(length, length + number)]
    for step, change, index in sorted(_changes(running, size, number)):
        if change == _BLOCK:
            blocks.extend(running[index], 1)
        else:
            running[index].num_computed_tokens = begun[index] + step + 1
            blocks.cache_full_blocks(running[index])
    for sequence, before in zip(running, begun, strict=True):
        sequence.num_computed_tokens = before + number
    engine.num_steps += number
    return [[_output(sequence, index) for sequence in running] for index in range(-number, 0)]


def _output(sequence: EngineSequence, index: int) -> EngineOutput:
    token_ids = [sequence.tokens[index]]
    return EngineOutput(
        request_id=sequence.request_id, token_ids=token_ids, num_cached_tokens=sequence.num_cached_tokens
    )


def _changes(running: Sequence[EngineSequence], size: int, number: int) -> Iterator[tuple[int, int, int]]:
    """(step, change, index of the sequence) for all changes of blocks in these steps."""
    for index, sequence in enumerate(running):
        first = sequence.num_computed_tokens
        for step in range(len(sequence.block_ids) * size - first, number, size):
            yield step, _BLOCK, index
        for step in range(-(first + 1) % size, number, size):
            yield step, _FULL, index


class Batches:
    """Outputs of one engine that leave it in batches of tokens: owns the held ones.

    The first output of a request, and its last with all before it, are never held. A client that measures it gets the
    times at which the tokens of a batch were computed (`Simulation.token_times`).
    """

    def __init__(self, max_tokens: int, simulation: Simulation) -> None:
        self._max_tokens, self._simulation = max_tokens, simulation
        self._held: dict[str, EngineOutput] = {}
        self._times: dict[str, list[float]] = {}

    def pass_on(self, outputs: Sequence[EngineOutput], computed_at: float) -> list[EngineOutput]:
        """The outputs of one step that leave now."""
        leaving = []
        for output in outputs:
            name = output.request_id
            held = self._held.get(name)
            if held is None:
                if output.finish_reason is None:
                    self._held[name] = EngineOutput(request_id=name)
                    self._times[name] = []
                leaving.append(output)
                continue
            times = self._times[name]
            times += [computed_at] * len(output.token_ids)
            if held.token_ids:
                output.token_ids = held.token_ids + output.token_ids
                output.logprobs = held.logprobs + output.logprobs
            if output.finish_reason is None and len(output.token_ids) < self._max_tokens:
                self._held[name] = output
                continue
            leaving.append(output)
            if len(times) > 1 and (token_times := self._simulation.token_times.get(name.rsplit("-", 2)[0])) is not None:
                token_times.append((self._simulation.now, times))  # by the answer's id: see `engine.server.planning`
            if output.finish_reason is None:
                self._held[name], self._times[name] = EngineOutput(request_id=name), []
            else:
                del self._held[name], self._times[name]
        return leaving
