"""What speculative decoding by prompt lookup saves: tokens per CPU second with and without, in one process and turns.

Three texts: code of the built-in model, whose answers repeat what is before them; a constrained answer, of which the
schema leaves little open; and an 88M-parameter model with random weights, whose answers repeat nothing, which is the
worst case. One thread. Prints medians, writes results/speculation.<processor>.json.

    python benchmarks/speculation.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.structured_outputs import StructuredOutputs
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.structured.llguidance_backend import LlguidanceBackend
from kvferry.models.catalog import resolve
from models import make_bench_model
from report import print_machine, save

SPECULATIVE = '{"method": "ngram", "num_speculative_tokens": 6}'
SIDES: Mapping[str, str | None] = {"without": None, "with": SPECULATIVE}
CODE = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in",
    "class A:\n    def __init__(self):\n        self.a = 1\n        self.b = 2\n        self.c =",
)
ITEM = {
    "type": "object",
    "properties": {"identifier": {"type": "integer"}, "is_available": {"type": "boolean"}},
    "required": ["identifier", "is_available"],
    "additionalProperties": False,
}
RECORDS = StructuredOutputs(
    kind="json", content=json.dumps({"type": "array", "items": ITEM, "minItems": 200}), whitespace_pattern=""
)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each cell and side")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    return parser.parse_args()


def engine_of(model: str, speculative: str | None) -> Engine:
    """An engine on one thread."""
    return Engine(
        EngineConfig(
            model=model,
            dtype="float32",
            device="cpu",
            num_threads=1,
            max_model_len=2048,
            kv_cache_memory="512MiB",
            prefix_caching=False,
            speculative_config=speculative,
        )
    )


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> tuple[list[list[int]], float]:
    """The answers, and CPU seconds from the first token of the last sequence on."""
    answers: dict[str, list[int]] = {}
    grammar = None
    if sampling.structured_outputs is not None:
        model = engine.model
        backend = LlguidanceBackend(model.tokenizer, model.vocab_size, sorted(model.eos_token_ids))
        grammar = backend.compile(sampling.structured_outputs)
    for index, prompt in enumerate(prompts):
        answers[str(index)] = []
        matcher = None if grammar is None else grammar.matcher()
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, matcher=matcher))
    began = 0.0
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        if not began and all(answers.values()):
            began = time.process_time()
    return list(answers.values()), time.process_time() - began


def measure(model: str, prompts: list[list[int]], sampling: SamplingParams, repeat: int) -> dict[str, Any]:
    """Medians of tokens per CPU second by side, and the share of drafted tokens that were accepted."""
    engines = {side: engine_of(model, speculative) for side, speculative in SIDES.items()}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    expected: list[list[int]] | None = None
    try:
        for _ in range(repeat + 1):
            for side, engine in engines.items():
                answers, seconds = run(engine, prompts, sampling)
                if answers != (expected or answers):
                    raise RuntimeError("the answers differ")
                expected = answers
                rates[side].append(sum(len(answer) - 1 for answer in answers) / seconds)
        counters = engines["with"].statistics().scheduler.drafts
    finally:
        for engine in engines.values():
            engine.close()
    medians = {side: statistics.median(values[1:]) for side, values in rates.items()}
    return {
        **medians,
        "ratio": medians["with"] / medians["without"],
        "drafted": counters.num_draft_tokens,
        "accepted": counters.num_accepted_tokens,
    }


def main() -> None:
    """All texts and batches."""
    options = parse()
    print_machine()
    tiny = str(resolve("kvferry/tiny-python"))
    free = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    constrained = SamplingParams(max_tokens=options.tokens, temperature=0.0, structured_outputs=RECORDS)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        random_model = make_bench_model(Path(folder))
        cells = {"code": (tiny, free), "records": (tiny, constrained), "random weights": (random_model, free)}
        for name, (model, sampling) in cells.items():
            engine = engine_of(model, None)
            encode = engine.model.tokenizer.backend_tokenizer.encode
            for batch in options.batches:
                prompts = [[*encode(CODE[index % len(CODE)]).ids, 20 + index] for index in range(batch)]
                figures = results[f"{name}, b{batch}"] = measure(model, prompts, sampling, options.repeat)
                print(
                    f"  {name}, b{batch:<3} {figures['without']:8.0f} {figures['with']:8.0f} tokens per CPU second,"
                    f" ratio {figures['ratio']:.2f}; accepted {figures['accepted']} of {figures['drafted']}",
                    flush=True,
                )
            engine.close()
    settings = {"repeat": options.repeat, "tokens": options.tokens, "speculative_config": SPECULATIVE, "threads": 1}
    print(f"wrote {save('speculation', settings, results)}")


if __name__ == "__main__":
    main()
