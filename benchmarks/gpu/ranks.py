"""Step *ranks*: two GPUs as two tensor-parallel ranks over NCCL, and KV from one rank to two. On a CPU the ranks meet
over gloo. Never run on GPUs.
"""

from __future__ import annotations

from gpu.context import Context
from gpu.right import (
    NUM_PROMPTS,
    TOLERANCE,
    Producer,
    answer,
    hand_off,
    make_engine,
    make_model,
    one_by_one,
    prompts_of,
    record,
)


def run(context: Context) -> None:
    """Two ranks answer as one does; then a hand-off from one rank to two."""
    model = make_model(context, "llama")
    prompts = prompts_of(model, NUM_PROMPTS)
    with Producer(model, context.device, "float32") as producer:
        engine = make_engine(model, context.device, "float32", prefix_caching=False)
        expected = one_by_one(engine, prompts)
        engine.close()
        engine = make_engine(model, context.device, "float32", prefix_caching=False, tensor_parallel_size=2)
        record(context, "float32, two ranks", expected, answer(engine, prompts), TOLERANCE)
        engine.close()
        hand_off(context, producer, prompts, expected, ranks=2)
