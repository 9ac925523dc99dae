"""Constrained answers are valid, and the same over two instances, after preemption and when another one continues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from kvferry.core.errors import GrammarFailed
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.structured_outputs import StructuredOutputs
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import Answer, matcher_of, random_prompts, require_same, run_prompts, run_requests
from support.pairs import pair_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["ferry", "bridge", None, 3]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "maxItems": 3},
        "when": {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"},
    },
    "required": ["name", "kind", "sizes", "when"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": StructuredOutputs(kind="json", content=json.dumps(SCHEMA)),
    "compact": StructuredOutputs(kind="json", content=json.dumps(SCHEMA), whitespace_pattern=""),
    "regex": StructuredOutputs(kind="regex", content="(ab|cd){2,5}[0-9]{3}"),
    "choice": StructuredOutputs(kind="choice", content=json.dumps(["a", "yes", 'no\n"q"\\', "é😀", "yesterday"])),
    "one token": StructuredOutputs(kind="choice", content=json.dumps(["a", "b", "c"])),
    "lark": StructuredOutputs(kind="grammar", content='start: "(" start ")" | /[0-9]{1,4}/'),
    "gbnf": StructuredOutputs(kind="grammar", content='root ::= "x" [0-9]+ ("," [a-c])* "."'),
}
GREEDY = SamplingParams(max_tokens=300, temperature=0.0, logprobs=2)
VARIANTS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=300, temperature=0.9, top_p=0.95, seed=11, logprobs=2),
    "ignore_eos": SamplingParams(max_tokens=300, temperature=1.0, seed=3, ignore_eos=True),
    "min_tokens": SamplingParams(max_tokens=300, temperature=1.0, seed=3, min_tokens=250),
    "penalties": SamplingParams(
        max_tokens=300, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={5: 9.0}
    ),
}


def of(variant: str, constraint: str) -> SamplingParams:
    return msgspec.structs.replace(VARIANTS[variant], structured_outputs=CONSTRAINTS[constraint])


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


LONG = StructuredOutputs(kind="regex", content="([a-z]{1,4} ){30,60}end")


VALID: dict[str, Callable[[str], bool]] = {
    "schema": is_json,
    "compact": is_json,
    "regex": lambda text: re.fullmatch("(ab|cd){2,5}[0-9]{3}", text) is not None,
    "choice": lambda text: text in json.loads(CONSTRAINTS["choice"].content),
    "one token": lambda text: text in ("a", "b", "c"),
    "lark": lambda text: re.fullmatch(r"(\()*[0-9]{1,4}(\))*", text) is not None and text.count("(") == text.count(")"),
    "gbnf": lambda text: re.fullmatch(r"x[0-9]+(,[a-c])*\.", text) is not None,
}


@pytest.fixture(scope="module")
def model(model_maker: Any) -> Path:
    return model_maker("llama")


@pytest.fixture(scope="module")
def alone(model: Path) -> Any:
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(alone: Engine) -> list[list[int]]:
    return random_prompts(6, alone.model.vocab_size, longest=60, block_size=8, seed=9)


def text_of(engine: Engine, answer: Answer) -> str:
    tokens = [token for token in answer.tokens if token not in engine.model.eos_token_ids]
    return str(engine.model.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False))


def require_valid(engine: Engine, constraint: str, answers: Sequence[Answer]) -> None:
    num_complete = 0
    for answer in answers:
        assert answer.last is not None
        assert answer.last.error is None
        if answer.last.finish_reason == "stop":
            num_complete += 1
            assert VALID[constraint](text_of(engine, answer)), text_of(engine, answer)
    assert num_complete, "no answer was complete"


@pytest.mark.diagonal
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_hand_off_equals_one_engine(
    constraint: str, variant: str, form: str, model: Path, alone: Engine, prompts: list[list[int]]
) -> None:
    sampling = of(variant, constraint)
    expected = run_prompts(alone, prompts, sampling)
    require_valid(alone, constraint, expected)
    extra = {"transport": "shm", "timeout_s": 300.0}
    sizes = {"block_size": 16, "max_num_batched_tokens": 40}
    with pair_of(model, "P2pConnector", extra=extra, prefill=sizes, decode={"block_size": 16}) as pair:
        require_same(expected, pair.run(prompts, sampling, form, must_load=False))
        assert pair.decode.statistics().scheduler.num_tokens_not_adopted == 0
        pair.settle()


@pytest.mark.parametrize("variant", ["greedy", "seeded"])
def test_preemption_and_recomputation_change_nothing(
    variant: str, model: Path, alone: Engine, prompts: list[list[int]]
) -> None:
    sampling = msgspec.structs.replace(of(variant, "regex"), structured_outputs=LONG)
    expected = run_prompts(alone, prompts * 3, sampling)
    tight = Engine(
        EngineConfig(
            model=str(model), dtype="float32", device="cpu", block_size=8, kv_cache_memory="384KiB", max_model_len=256
        )
    )
    try:
        require_same(expected, run_prompts(tight, prompts * 3, sampling))
        assert tight.statistics().scheduler.num_preemptions > 0
    finally:
        tight.close()


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 30])
def test_another_engine_continues(num_tokens: int, alone: Engine, prompts: list[list[int]]) -> None:
    sampling = of("seeded", "schema")
    whole = run_prompts(alone, prompts[:1], sampling)[0].tokens
    answer = whole[: min(num_tokens, len(whole) - 1)]
    request = Request(
        request_id="continued",
        prompt_token_ids=prompts[0],
        answer_token_ids=answer,
        sampling=sampling,
        matcher=matcher_of(alone, sampling, answer),
    )
    assert answer + run_requests(alone, [request])["continued"].tokens == whole


def test_a_grammar_that_fails_ends_its_request_alone(alone: Engine, prompts: list[list[int]]) -> None:
    class Failing:
        """Fails at the third token, in its mask or when it advances."""

        is_complete = False

        def __init__(self, fails_in_mask: bool) -> None:
            self.fails_in_mask, self.num_tokens = fails_in_mask, 0

        def permitted(self) -> Any:
            if self.fails_in_mask and self.num_tokens == 2:
                raise GrammarFailed("a limit")
            return np.full(-(-alone.model.vocab_size // 8), 255, dtype=np.uint8)

        def accept(self, token_id: int) -> None:
            self.num_tokens += 1
            if self.num_tokens == 3:
                raise GrammarFailed("a limit")

    plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    expected = run_prompts(alone, prompts[:1], plain)[0].tokens
    answers = run_requests(
        alone,
        [
            Request(request_id="mask", prompt_token_ids=prompts[0], sampling=plain, matcher=Failing(True)),
            Request(request_id="accept", prompt_token_ids=prompts[0], sampling=plain, matcher=Failing(False)),
            Request(request_id="other", prompt_token_ids=prompts[0], sampling=plain),
        ],
    )
    assert answers["other"].tokens == expected
    for name in ("mask", "accept"):
        last = answers[name].last
        assert last is not None
        assert last.finish_reason == "error"
        assert isinstance(last.error, GrammarFailed)
    alone.check()


def test_log_probabilities_are_the_models_own(alone: Engine, prompts: list[list[int]]) -> None:
    """Those of the first token are the same as without a constraint."""
    constrained = run_prompts(alone, prompts[:1], of("greedy", "one token"))[0].logprobs[0]
    plain = run_prompts(alone, prompts[:1], GREEDY)[0].logprobs[0]
    assert constrained.top == plain.top
