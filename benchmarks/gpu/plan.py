"""The steps of `make gpu`, each with the limit after which it is ended."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A module of this package with a function `run`. `limit_s`: seconds. `min_gpus`: left out with fewer GPUs."""

    name: str
    limit_s: float
    question: str
    min_gpus: int = 1

    @property
    def module(self) -> str:
        """Name of the module that has the step."""
        return f"gpu.{self.name.replace('-', '_')}"


STEPS = (
    Step("doctor", 20, "what is on this machine?"),
    Step("right", 60, "are the tokens those of a CPU, alone, batched, in chunks, handed off and from stores?"),
    Step("kernels", 60, "how fast is attention over the paged KV cache?"),
    Step("engine", 90, "how fast is the engine, beside vLLM?"),
    Step("hand-off", 60, "how fast does KV go from P to D?"),
    Step("offload", 45, "how fast does KV go to host memory and back?"),
    Step("picture", 120, "do long prompts stall other answers?"),
    Step("lmcache", 60, "what is a hit in a CPU tier worth, beside LMCache?"),
    Step("ranks", 60, "do two GPUs work as P and D, and as two ranks?", min_gpus=2),
)
REPORT_S = 15.0
"""Seconds that are set aside for the report."""


class UnknownStep(ValueError):
    """A step that does not exist."""


def choose_steps(names: Sequence[str], num_gpus: int) -> list[Step]:
    """The steps to run, in their order: all that this number of GPUs can run, or those named, whatever the number.

    Raises `UnknownStep`, with the nearest name.
    """
    by_name = {step.name: step for step in STEPS}
    for name in names:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UnknownStep(f"there is no step {name!r}{hint} The steps are: {', '.join(by_name)}")
    if names:
        return [step for step in STEPS if step.name in names]
    return [step for step in STEPS if step.min_gpus <= num_gpus]
