"""Step *right*: the engine's tokens on the GPU, against a CPU's and against the GPU's own, one prompt at a time.

In float32, answers are equal to the CPU's. In bfloat16, an answer may differ from the one of a prompt alone where the
other token is as good, within a step of bfloat16, since PyTorch's products depend on the shape of a batch.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu.context import Context
from kvferry.core.messages.hand_off import HandOff, Produce, TokenLogprobs, parse_hand_off
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.models.random_model import make_random_model
from kvferry.testing.stepping import IdleWait

ARCHITECTURES = ("llama", "mistral", "gemma3", "gpt_oss", "qwen3_moe")
NUM_PROMPTS = 8
BLOCK_SIZE = 16
STEP = 1 / 16
"""Between two numbers of bfloat16 from 8 to 16, as the best logits are here."""
TOLERANCE = 1e-3
"""Of log-probabilities in float32."""
MAX_DIFFERING = 1 / 4
"""Share of bfloat16 answers that may differ by tokens as good."""
TOKEN = "of this run"
"""With which P and D know each other."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5)


@dataclass
class Answer:
    """The tokens of one request, each with the log-probabilities of the best ones beside it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    params: dict[str, Any] | None = None


def run(context: Context) -> None:
    """Each architecture alone, batched and in chunks; then hand-offs, then stores."""
    model = make_model(context, "llama")
    dtypes = ("float32",) if context.small else ("float32", "bfloat16")
    with ExitStack() as stack:
        # They load while the architectures are compared.
        producers = {dtype: stack.enter_context(Producer(model, context.device, dtype)) for dtype in dtypes}
        for architecture in ARCHITECTURES[:1] if context.small else ARCHITECTURES:
            _compare(context, architecture)
        for dtype, producer in producers.items():
            prompts = prompts_of(model, NUM_PROMPTS)
            engine = make_engine(model, context.device, dtype, prefix_caching=False)
            expected = one_by_one(engine, prompts)
            engine.close()
            hand_off(context, producer, prompts, expected)
            _store(context, model, prompts, dtype)


def _compare(context: Context, architecture: str) -> None:
    model = make_model(context, architecture)
    prompts = prompts_of(model, NUM_PROMPTS)
    _compare_with_cpu(context, architecture, model, prompts)
    if not context.small:
        _compare_in_bfloat16(context, architecture, model, prompts)


def make_model(context: Context, architecture: str) -> Path:
    """A tiny random model."""
    folder = context.folder / "models" / architecture
    return folder if folder.exists() else make_random_model(folder, architecture)


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Prompts of 1 to 90 tokens, some of which end with a block or share a prefix."""
    rng = random.Random(str(model.name))
    trunk = [rng.randrange(5, 500) for _ in range(90)]
    lengths = [1, BLOCK_SIZE, BLOCK_SIZE + 1, 90, *(rng.randrange(2, 90) for _ in range(count))][:count]
    prompts = []
    for number, length in enumerate(lengths):
        shared = length // 2 if number % 2 else 0
        prompts.append([*trunk[:shared], *(rng.randrange(5, 500) for _ in range(length - shared))])
    return prompts


def make_engine(model: Path, device: str, dtype: str, transfer: KVTransferConfig | None = None, **more: Any) -> Engine:
    """An engine with a small KV cache that computes prompts in chunks; `more` are other settings."""
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "kv_cache_memory": "64MiB", **more}
    config = EngineConfig(model=str(model), device=device, dtype=dtype, block_size=BLOCK_SIZE, **settings)  # type: ignore[arg-type]
    return Engine(config, transfer, auth_token=TOKEN)


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], hand_offs: Sequence[HandOff] | None = None
) -> list[Answer]:
    """Serve prompts together; answers in their order. Raises `RuntimeError` over a request that failed."""
    answers = {str(number): Answer() for number in range(len(prompts))}
    for name, prompt in zip(answers, prompts, strict=True):
        hand_off = hand_offs[int(name)] if hand_offs else None
        engine.add(Request(request_id=name, prompt_token_ids=list(prompt), sampling=GREEDY, hand_off=hand_off))
    rest = IdleWait(engine)
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason not in (None, "length", "stop"):
                raise RuntimeError(f"request {output.request_id} ended with {output.finish_reason}")
            received = answers[output.request_id]
            received.tokens += output.token_ids
            received.logprobs += output.logprobs
            received.params = output.kv_transfer_params or received.params
        rest()
    return list(answers.values())


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Each prompt alone."""
    return [answer(engine, [prompt])[0] for prompt in prompts]


def differences(expected: Sequence[Answer], answers: Sequence[Answer], step: float) -> tuple[list[str], int]:
    """Descriptions of tokens that are wrong, and how many answers differ by a token as good. `step`: by how much the
    log-probability of another token may be below the expected one's."""
    wrong, as_good = [], 0
    for number, (reference, other) in enumerate(zip(expected, answers, strict=True)):
        if len(other.tokens) != len(reference.tokens):
            wrong.append(f"prompt {number}: {len(other.tokens)} tokens instead of {len(reference.tokens)}")
            continue
        index = next(
            (at for at, pair in enumerate(zip(reference.tokens, other.tokens, strict=False)) if pair[0] != pair[1]),
            None,
        )
        if index is None:
            continue
        best = reference.logprobs[index]
        below = best.logprob - dict(best.top).get(other.tokens[index], float("-inf"))
        if below <= step:
            as_good += 1
        else:
            wrong.append(f"prompt {number}, token {index}: {other.tokens[index]} is worse by {below:.3g}")
    return wrong, as_good


def _compare_with_cpu(context: Context, architecture: str, model: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(model, "cpu", "float32")
    expected = answer(engine, prompts)
    engine.close()
    engine = make_engine(model, context.device, "float32", prefix_caching=False)
    for name, answers in (
        ("one by one", one_by_one(engine, prompts)),
        ("batched and in chunks", answer(engine, prompts)),
    ):
        wrong, as_good = differences(expected, answers, TOLERANCE)
        detail = "; ".join(wrong[:3])
        context.record.check(f"{architecture}, float32, {name}: a CPU's tokens", not wrong and not as_good, detail)
        pairs = zip(expected, answers, strict=True)
        largest = max(
            abs(left.logprob - right.logprob)
            for reference, other in pairs
            for left, right in zip(reference.logprobs, other.logprobs, strict=True)
        )
        name = f"{architecture}, float32, {name}: log-probabilities within {TOLERANCE:g}"
        context.record.check(name, largest <= TOLERANCE, f"they differ by up to {largest:.2g}")
    engine.check()
    engine.close()


def _compare_in_bfloat16(context: Context, architecture: str, model: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(model, context.device, "bfloat16", prefix_caching=False)
    expected, answers = one_by_one(engine, prompts), answer(engine, prompts)
    engine.close()
    record(context, f"{architecture}, bfloat16, batched and in chunks", expected, answers, STEP)


def record(context: Context, name: str, expected: list[Answer], answers: list[Answer], step: float) -> None:
    """Check that answers are those that are expected, up to tokens as good."""
    wrong, as_good = differences(expected, answers, step)
    if as_good > MAX_DIFFERING * len(expected):
        wrong.append(f"{as_good} of {len(expected)} answers differ")
    context.record.check(f"{name}: the tokens of one prompt at a time", not wrong, "; ".join(wrong[:3]))


class Producer:
    """P, in a process of its own, since CUDA maps no memory of its own process. Use it as a context; it loads from
    then on. `ranks`: tensor-parallel size."""

    def __init__(self, model: Path, device: str, dtype: str, ranks: int = 1) -> None:
        self.model, self.device, self.dtype, self.ranks = model, device, dtype, ranks
        spawn = multiprocessing.get_context("spawn")
        self.connection, self._theirs = spawn.Pipe()
        arguments = (self._theirs, str(model), device, dtype, ranks)
        self._process = spawn.Process(target=prefill, args=arguments)

    def __enter__(self) -> Producer:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def hand_off(
    context: Context, producer: Producer, prompts: list[list[int]], expected: list[Answer], ranks: int = 1
) -> None:
    """Prompts from P to a D with so many ranks, which gives the tokens of `expected`."""
    dtype = producer.dtype
    name = dtype if ranks == producer.ranks else f"{dtype}, {producer.ranks} rank to {ranks}"
    more = {"prefix_caching": False, "tensor_parallel_size": ranks}
    # Before P computes, whose KV is held for a while only: ranks may take long to start.
    engine = make_engine(producer.model, producer.device, dtype, transfer_of("kv_consumer"), **more)
    producer.connection.send(prompts)
    tickets = [parse_hand_off(params, f"{number}") for number, params in enumerate(producer.connection.recv())]
    answers = answer(engine, prompts, tickets)
    statistics = engine.statistics().external_kv
    context.record.check(
        f"{name}, handed off: the KV came",
        not statistics.num_load_failures and statistics.num_external_hits > 0,
        f"failures {statistics.num_load_failures}, tokens {statistics.num_external_hits}",
    )
    record(context, f"{name}, handed off", expected, answers, STEP if dtype == "bfloat16" else TOLERANCE)
    producer.connection.send(None)
    left = producer.connection.recv()
    context.record.check(f"{name}, handed off: P keeps nothing", left == 0, f"{left} hand-offs are held")
    engine.close()


def transfer_of(role: str) -> KVTransferConfig:
    """Hand-offs by the transport that `auto` chooses: CUDA IPC on one GPU, shared memory without."""
    return KVTransferConfig(kv_connector="P2pConnector", kv_role=role)  # type: ignore[arg-type]


def prefill(connection: Connection, model: str, device: str, dtype: str, ranks: int) -> None:
    """The process of P: answers prompts with tickets, steps until D has taken them, then says what is left."""
    more = {"prefix_caching": False, "tensor_parallel_size": ranks}
    engine = make_engine(Path(model), device, dtype, transfer_of("kv_producer"), **more)
    prompts = connection.recv()
    answers = answer(engine, prompts, [Produce(transfer_id=f"t{number}") for number in range(len(prompts))])
    connection.send([each.params for each in answers])
    rest = IdleWait(engine)
    while not connection.poll():
        engine.step()
        rest()
    for _ in range(1000):
        engine.step()
        if not engine.scheduler.external_kv.statistics().num_held:
            break
        rest()
    connection.send(engine.scheduler.external_kv.statistics().num_held)
    connection.recv()  # until this process is ended


def _store(context: Context, model: Path, prompts: list[list[int]], dtype: str) -> None:
    """Another engine loads the blocks that one engine has stored from device memory."""
    folder = context.scratch(f"store-{dtype}-{random.getrandbits(32):08x}")
    extra = {"store": f"file:{folder}?deadline_s=10"}
    config = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    engine = make_engine(model, context.device, dtype, config)
    expected = one_by_one(engine, prompts)
    engine.close()
    engine = make_engine(model, context.device, dtype, config)
    answers = one_by_one(engine, prompts)
    hits = engine.statistics().external_kv.num_external_hits
    engine.close()
    context.record.check(f"{dtype}, from a store: the KV came", hits > 0, "no token came from the store")
    record(context, f"{dtype}, from a store", expected, answers, STEP if dtype == "bfloat16" else TOLERANCE)
