"""Stretches of an engine's steps in which nothing happens but that sequences decode, and outputs that leave some at a
time: what makes long traces cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvferry.core.request import EngineOutput
from kvferry.engine.blocks.sequence_blocks import SequenceBlocks
from kvferry.engine.core import EngineCore
from kvferry.engine.sequence import Sequence as EngineSequence
from kvferry.sim.loop import Simulation

_BLOCK, _FULL = 0, 1
"""What happens to a sequence in a step: it gets a block before it computes, and has filled one afterwards."""


def decode_at_once(
    engine: EngineCore, number: int, token: Callable[[int, int], int]
) -> list[list[EngineOutput]] | None:
    """Make the next `number` steps, in all of which the same sequences decode and none ends: tokens, blocks, prefix
    cache and figures are afterwards as if each step had been made. `token`: of a seed and a position.

    Returns the outputs of each step. None: nothing was done, because blocks or the token budget may run out on the way,
    or a connector may have something to say; then the steps are to be made one by one.
    """
    scheduler, pool = engine.scheduler, engine.pool
    running, size = scheduler.decoding(), scheduler.limits.block_size
    lacking = sum(one.num_blocks_for(one.num_computed_tokens + number) - len(one.block_ids) for one in running)
    is_plain = not any(one.produces or one.request.deadline is not None for one in running)
    if lacking > pool.num_free or len(running) > scheduler.limits.max_num_batched_tokens or not is_plain:
        return None
    blocks, begun = SequenceBlocks(pool, size), [one.num_computed_tokens for one in running]
    for one in running:
        length = len(one.tokens)
        one.tokens += [token(one.seed, place) for place in range(length, length + number)]
    for step, what, place in sorted(_changes(running, size, number)):
        if what == _BLOCK:
            blocks.extend(running[place], 1)
        else:
            running[place].num_computed_tokens = begun[place] + step + 1
            blocks.publish(running[place])
    for one, before in zip(running, begun, strict=True):
        one.num_computed_tokens = before + number
    engine.num_steps += number
    return [[_output(one, place) for one in running] for place in range(-number, 0)]


def _output(sequence: EngineSequence, place: int) -> EngineOutput:
    token_ids = [sequence.tokens[place]]
    return EngineOutput(
        request_id=sequence.request_id, token_ids=token_ids, num_cached_tokens=sequence.num_cached_tokens
    )


def _changes(running: Sequence[EngineSequence], size: int, number: int) -> Iterator[tuple[int, int, int]]:
    """(step, what, place of the sequence) of all that happens to blocks in these steps."""
    for place, one in enumerate(running):
        first = one.num_computed_tokens
        for step in range(len(one.block_ids) * size - first, number, size):
            yield step, _BLOCK, place
        for step in range(-(first + 1) % size, number, size):
            yield step, _FULL, place


class Batches:
    """Outputs of one engine that leave it some tokens at a time: owns those that are held back.

    The first output of a request, and its last with all before it, are never held. When each token of a batch was
    computed is told to the client that measures it (`Simulation.token_times`).
    """

    def __init__(self, most: int, simulation: Simulation) -> None:
        self._most, self._simulation = most, simulation
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
            if output.finish_reason is None and len(output.token_ids) < self._most:
                self._held[name] = output
                continue
            leaving.append(output)
            if len(times) > 1 and (told := self._simulation.token_times.get(name.rsplit("-", 2)[0])) is not None:
                told.append((self._simulation.now, times))  # by the answer's id: see `engine.server.planning`
            if output.finish_reason is None:
                self._held[name], self._times[name] = EngineOutput(request_id=name), []
            else:
                del self._held[name], self._times[name]
        return leaving
