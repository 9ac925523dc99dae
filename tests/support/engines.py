"""Drives real engines in one process, without HTTP."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.structured_outputs import Matcher
from kvferry.engine.engine import Engine
from kvferry.engine.structured.llguidance_backend import LlguidanceBackend
from kvferry.testing.stepping import IdleWait

ARCHITECTURES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_oss",
    "deepseek_v3",
]
"""One family of each kind of attention, norm and feed-forward that the engine runs."""

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=11, ignore_eos=True, logprobs=2)


@dataclass
class Answer:
    """Everything one request brought."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: EngineOutput | None = None

    def add(self, output: EngineOutput) -> None:
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.last = output


def run_requests(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Serve the requests together until all have ended."""
    answers: dict[str, Answer] = {}
    for request in requests:
        answers[request.request_id] = Answer()
        engine.add(request)
    rest = IdleWait(engine)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
        rest()
    return answers


def run_prompts(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
    """Serve prompts together; answers in their order."""
    requests = [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=list(prompt),
            sampling=sampling,
            matcher=matcher_of(engine, sampling),
        )
        for number, prompt in enumerate(prompts)
    ]
    answers = run_requests(engine, requests)
    return [answers[request.request_id] for request in requests]


def matcher_of(engine: Engine, sampling: SamplingParams, answer: Sequence[int] = ()) -> Matcher | None:
    """The state of the constraint after these tokens, as a server makes it; None without a constraint."""
    constraint = sampling.structured_outputs
    if constraint is None:
        return None
    backend = LlguidanceBackend(engine.model.tokenizer, engine.model.vocab_size, sorted(engine.model.eos_token_ids))
    return backend.compile(constraint).matcher(answer)


def run_side_by_side(engines: Sequence[Engine], prompts: Sequence[Sequence[int]]) -> list[list[Answer]]:
    """Serve the prompts on each engine, stepped in turn."""
    found, rest = [[Answer() for _ in prompts] for _ in engines], IdleWait(*engines)
    for engine in engines:
        for number, prompt in enumerate(prompts):
            engine.add(Request(request_id=str(number), prompt_token_ids=list(prompt), sampling=GREEDY))
    while any(answer.last is None or answer.last.finish_reason is None for answers in found for answer in answers):
        for engine, answers in zip(engines, found, strict=True):
            for output in engine.step():
                answers[int(output.request_id)].add(output)
        rest()
    return found


def random_prompts(count: int, vocab: int, *, longest: int, block_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens: some share a prefix, some end exactly at a block."""
    source = random.Random(seed)
    trunk = [source.randrange(vocab) for _ in range(longest)]
    prompts = []
    for _ in range(count):
        length = source.choice(
            [1, 2, source.randint(1, longest), block_size * source.randint(1, longest // block_size)]
        )
        shared = source.choice([0, 0, min(length, source.randint(0, longest))])
        prompts.append([*trunk[:shared], *(source.randrange(vocab) for _ in range(length - shared))])
    return prompts


def generate_greedy(model_dir: object, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What `model.generate()` answers, one prompt at a time, with transformers' own attention and cache."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # go on after it, as `ignore_eos` does; a minimum would forbid it
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def require_same(expected: Sequence[Answer], found: Sequence[Answer], tolerance: float = 1e-4) -> None:
    """Same token ids, and log-probabilities within `tolerance`."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert other.tokens == one.tokens, f"prompt {number}"
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(left.logprob - right.logprob) < tolerance, f"prompt {number}"
