"""Speculative decoding changes nothing but the number of steps, and drafts only where that pays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.core.sampling import SamplingParams
from kvferry.core.structured_outputs import StructuredOutputs
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.scheduling.speculation import DraftState, PromptLookup, SpeculativeConfig, StepCost
from kvferry.models.catalog import resolve
from support.engines import require_same, run_prompts
from support.pairs import pair_of

CONFIG = SpeculativeConfig(num_speculative_tokens=6)
ON = msgspec.json.encode(CONFIG).decode()
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
VARIANTS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "logprobs": SamplingParams(max_tokens=60, temperature=0.0, logprobs=3),
    "seeded": SamplingParams(max_tokens=60, temperature=0.6, top_p=0.9, top_k=20, seed=7),
    "penalties": SamplingParams(
        max_tokens=60, seed=5, temperature=0.4, repetition_penalty=1.05, presence_penalty=0.1, logit_bias={5: 4.0}
    ),
    "min_tokens": SamplingParams(max_tokens=60, temperature=0.0, min_tokens=50, stop_token_ids=tuple(range(5, 400))),
    "stop tokens": SamplingParams(max_tokens=60, temperature=0.0, stop_token_ids=tuple(range(5, 3000, 31))),
    "bad words": SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, bad_words=((9,), (11, 12))),
    "a list": SamplingParams(
        max_tokens=200,
        temperature=0.3,
        seed=2,
        structured_outputs=StructuredOutputs(
            kind="json",
            content=json.dumps(
                {"type": "array", "items": {"enum": ["ferry", "bridge"]}, "minItems": 9, "maxItems": 20}
            ),
            whitespace_pattern="",
        ),
    ),
    "one text": SamplingParams(
        max_tokens=200,
        temperature=0.0,
        structured_outputs=StructuredOutputs(kind="regex", content="(abc, ){12}end"),
    ),
}


def engine_of(model: Path, speculative: str | None, **more: Any) -> Engine:
    """An engine whose steps take no time, so that drafts always seem to pay."""
    sizes = {"block_size": 8, "kv_cache_memory": "64MiB", "max_model_len": 400, **more}
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", seed=1, speculative_config=speculative, **sizes
    )
    return Engine(config, clock=ManualClock())


CODE = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in",
    "class A:\n    def __init__(self):\n        self.a = 1\n        self.b = 2\n        self.c =",
    "import os\n",
)


@pytest.fixture(scope="module")
def model() -> Path:
    """A model whose answers repeat themselves, which those of random weights do not."""
    return resolve("kvferry/tiny-python")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    engine = engine_of(model, None)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[Engine]:
    engine = engine_of(model, ON)
    yield engine
    engine.check()
    engine.close()


@pytest.fixture(scope="module")
def prompts(alone: Engine) -> list[list[int]]:
    encode = alone.model.tokenizer.backend_tokenizer.encode
    return [list(encode(text * number).ids) for text in CODE for number in (1, 2)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_the_same(variant: str, alone: Engine, drafting: Engine, prompts: list[list[int]]) -> None:
    sampling = VARIANTS[variant]
    before = drafting.statistics()
    require_same(run_prompts(alone, prompts, sampling), run_prompts(drafting, prompts, sampling))
    after = drafting.statistics().scheduler.drafts
    assert after.num_draft_tokens > before.scheduler.drafts.num_draft_tokens
    assert after.num_draft_tokens >= after.num_accepted_tokens
    drafting.check()


def test_text_that_repeats_itself_takes_fewer_steps(alone: Engine, drafting: Engine, prompts: list[list[int]]) -> None:
    sampling = msgspec.structs.replace(VARIANTS["one text"])
    steps = []
    for engine in (alone, drafting):
        before = engine.num_steps
        run_prompts(engine, prompts[:1], sampling)
        steps.append(engine.num_steps - before)
    assert steps[1] < 0.7 * steps[0]
    assert drafting.statistics().scheduler.drafts.num_accepted_tokens > 0


@pytest.mark.parametrize("variant", ["greedy", "seeded", "a list"])
def test_preemption_changes_nothing(variant: str, model: Path, alone: Engine, prompts: list[list[int]]) -> None:
    expected = run_prompts(alone, prompts * 3, VARIANTS[variant])
    tight = engine_of(model, ON, kv_cache_memory="2MiB", max_num_batched_tokens=64, max_num_seqs=32)
    try:
        require_same(expected, run_prompts(tight, prompts * 3, VARIANTS[variant]))
        assert tight.statistics().scheduler.num_preemptions > 0
        tight.check()
    finally:
        tight.close()


def test_answers_that_reach_the_longest_length_are_the_same(model: Path, prompts: list[list[int]]) -> None:
    answers = []
    sampling = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    for speculative in (None, ON):
        engine = engine_of(model, speculative, max_model_len=100)
        answers.append(run_prompts(engine, prompts[:5], sampling))
        engine.check()
        engine.close()
    require_same(*answers)


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("variant", ["greedy", "seeded", "a list"])
def test_a_hand_off_equals_one_engine(
    variant: str, form: str, model: Path, alone: Engine, prompts: list[list[int]]
) -> None:
    expected = run_prompts(alone, prompts, VARIANTS[variant])
    extra = {"transport": "shm", "timeout_s": 300.0}
    decode = {"block_size": 16, "speculative_config": ON}
    with pair_of(model, "P2pConnector", extra=extra, prefill={"block_size": 16}, decode=decode) as pair:
        require_same(expected, pair.run(prompts, VARIANTS[variant], form, must_load=False))
        assert pair.decode.statistics().scheduler.drafts.num_draft_tokens > 0
        pair.settle()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 7),
)
def test_drafts_continue_the_latest_of_the_longest_matches(tokens: list[int], least: int, more: int, k: int) -> None:
    config = SpeculativeConfig(num_speculative_tokens=8, prompt_lookup_min=least, prompt_lookup_max=least + more)
    lookup = PromptLookup(config)
    for end in range(1, len(tokens) + 1):
        draft = lookup.draft(tokens[:end], k)
        known = tokens[:end]
        begins = [at for at in range(least, end) if known[at - least : at] == known[end - least :]]
        assert bool(draft) == bool(begins)
        if draft:
            assert len(draft) == k
            begins = begins[-lookup.max_candidates :]
            longest = max(begins, key=lambda at: (common_end(known[:at], known, least + more), at))
            period = end - longest
            assert draft == [known[longest + offset % period] for offset in range(k)]


def common_end(left: list[int], right: list[int], limit: int) -> int:
    length = 0
    while length < min(limit, len(left), len(right)) and left[-length - 1] == right[-length - 1]:
        length += 1
    return length


def test_the_cost_of_a_token_is_measured() -> None:
    cost = StepCost()
    assert cost.share(8) == 0.0
    for num_tokens in (8, 16, 32, 24) * 20:
        cost.observe(num_tokens, 0.010 + 0.001 * num_tokens)
        cost.observe(num_tokens, 0.0)
    assert cost.share(8) == pytest.approx(8 * 0.001 / 0.018, rel=0.01)
    assert cost.share(90) == pytest.approx(0.9, rel=0.01)
    for num_tokens in (1, 2, 3) * 200:
        cost.observe(num_tokens, 0.004 * num_tokens)
    assert cost.share(1) == pytest.approx(1.0, abs=0.01)


def test_drafts_that_are_refused_become_shorter_and_come_back() -> None:
    state = DraftState(CONFIG)
    assert state.num_tokens(6, 0.0) == 6
    for _ in range(20):
        state.observe(4, 0)
    assert state.num_tokens(6, 0.3) == 0
    later = [state.num_tokens(6, 0.3) for _ in range(60)]
    assert later[0] == 0 < max(later)
    for _ in range(20):
        state.observe(4, 4)
    assert state.num_tokens(6, 0.3) == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON object"),
        ("[]", "no JSON object"),
        ("{}", "num_speculative_tokens is required"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"num_speculative_tokens": 65}', "num_speculative_tokens"),
        ('{"num_speculative_token": 4}', "num_speculative_tokens"),
        ('{"method": "eagle", "model": "x", "num_speculative_tokens": 4}', "not by 'eagle'"),
        ('{"num_speculative_tokens": 4, "prompt_lookup_min": 6}', "larger than prompt_lookup_max"),
    ],
)
def test_wrong_settings_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(model="m", speculative_config=text)
