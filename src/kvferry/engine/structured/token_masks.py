"""Fills the masks of a step's sequences on a thread of its own, while the model computes."""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvferry.core.runtime.threads import ThreadPool
from kvferry.engine.ops.most_likely import Bits
from kvferry.engine.sampler import permitted_tokens
from kvferry.engine.scheduling.sequence import Sequence


@dataclass
class Masks:
    """`permitted`: by request id, for sequences that have a grammar. `failed`: those whose grammar cannot go on."""

    permitted: dict[str, Bits] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)


NO_MASKS = Masks()


class TokenMasks:
    """The thread of one engine that fills masks; it starts with the first grammar. Used from the engine's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPool(1, name="token-masks")

    def begin(self, sequences: abc.Sequence[Sequence]) -> Future[Masks] | None:
        """Begin to fill the masks of these sequences; None: none of them has a grammar. Until the result is there,
        nothing else may use their matchers."""
        constrained = [sequence for sequence in sequences if sequence.matcher is not None]
        return self._thread.submit(self._fill, constrained) if constrained else None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)

    def _fill(self, sequences: abc.Sequence[Sequence]) -> Masks:
        masks = Masks()
        for sequence in sequences:
            assert sequence.matcher is not None  # `begin` has chosen them
            try:
                masks.permitted[sequence.request_id] = permitted_tokens(sequence.matcher, self._vocab_size)
            except Exception as error:  # noqa: BLE001 - the boundary between one sequence and the others
                masks.failed[sequence.request_id] = error
        return masks
