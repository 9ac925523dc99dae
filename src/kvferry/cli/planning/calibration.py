"""Times of a real engine, measured over HTTP with short requests: what `kvferry calibrate` does.

Steps that decode are timed by the gaps between tokens of streams that run side by side; those that prefill, by the
stamps of an instance's timeline. So the cost of a step is all that passes until the next one: what Python and HTTP take
of an instance's core is part of it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from kvferry.cli.cache.warming import Server
from kvferry.cli.demo.requests import DemoAnswer, Endpoint, Piece
from kvferry.core.blocks.layout import DTYPE_BYTES, KVLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.sim.fit import fit_steps, fit_transfer
from kvferry.sim.times import KVSize, MachineTimes, StepSample, StepWork, TransferTimes

STREAMS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32, 256, 1024)
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
TOKENS = 24
"""Tokens of each timed stream."""
REPEATS = 5
PAUSE_S = 0.2
"""Before each measurement. A processor that was idle a moment ago is slower than one that has been busy for long, by a
third on some machines; and so it is under most traffic."""
_TEXTS = ("tarfile.py", "typing.py", "subprocess.py", "pickle.py", "inspect.py", "argparse.py")


@dataclass(frozen=True)
class InstanceLimits:
    """What an instance can do, as it says of itself."""

    facts: InstanceFacts
    max_num_seqs: int
    max_num_batched_tokens: int

    def streams(self) -> Iterator[tuple[int, int]]:
        """Numbers of streams and lengths of their prompts that fit."""
        for number in STREAMS:
            for context in CONTEXTS:
                length = context + TOKENS
                if number <= self.max_num_seqs and self._fits(length, number):
                    yield number, context

    def prompts(self, longest: int | None = None) -> list[int]:
        """Lengths of prompts that are prefilled in one step."""
        most = min(self.max_num_batched_tokens, longest or self.max_num_batched_tokens)
        return [one for one in PROMPTS if one <= most and self._fits(one + 2, 1)]

    def _fits(self, length: int, number: int) -> bool:
        facts = self.facts
        return length < facts.max_model_len and number * (length + facts.block_size) < facts.num_kv_tokens


class Texts:
    """Prompts of any length that share no prefix: tokens of Python's own library, in an order that `seed` decides."""

    def __init__(self, token_ids: list[int], seed: int) -> None:
        self._token_ids, self._random = token_ids, Random(seed)

    @classmethod
    async def read(cls, endpoint: Endpoint, max_model_len: int, seed: int) -> Texts:
        """Have the texts made tokens by the model's own tokenizer, in pieces that it takes."""
        token_ids: list[int] = []
        for name in _TEXTS:
            text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
            length = min(len(text), max_model_len // 2)
            token_ids += (await endpoint.post("/tokenize", {"prompt": text[:length]}))["tokens"]
        return cls(token_ids, seed)

    def prompt(self, num_tokens: int) -> Piece:
        """The next prompt."""
        return Piece("", self._random.choices(self._token_ids, k=num_tokens), "")


@dataclass
class Calibration:
    """One run. `instance`: measured alone; `router`: of P and D, None where there is none."""

    instance: Endpoint
    router: Endpoint | None
    limits: InstanceLimits
    texts: Texts
    on_progress: Callable[[float], None]
    steps: list[StepSample] = field(default_factory=list)
    transfers: list[tuple[float, float]] = field(default_factory=list)
    request_s: float = 0.0
    hop_s: float = 0.0
    _num_done: int = 0

    async def measure(self) -> None:
        """Measure everything, in an order in which what is slow at first is not timed."""
        streams, prompts = list(self.limits.streams()), self.limits.prompts()
        if not streams or not prompts:
            raise ConfigError("the instance's KV cache, or its model's longest context, is too small to measure it")
        total = len(streams) + 2 * len(prompts) + 1
        await self._prefill(prompts[0])  # the first of all is slow
        self.steps.clear()
        for number, context in streams:
            await self._decode(number, context)
            self._progress(total)
        for length in prompts:
            await self._prefill(length)
            self._progress(total)
        for length in prompts[1:]:
            await self._beside(length)
            self._progress(total)
        self.request_s, self.hop_s = await self._overheads()
        self.on_progress(1.0)

    def _progress(self, total: int) -> None:
        self._num_done += 1
        self.on_progress(self._num_done / total)

    async def _decode(self, number: int, context: int) -> None:
        """The gaps of one of `number` streams, while all run; through the router, if there is one, so that they are
        steps of an instance that waited for its KV."""
        endpoint = self.router or self.instance
        tokens = TOKENS + 2 * number  # they begin one after the other
        found = []
        for _ in range(REPEATS):
            prompts = [self.texts.prompt(context) for _ in range(number)]
            await asyncio.sleep(PAUSE_S)
            answers = await asyncio.gather(*(endpoint.ask(one, tokens) for one in prompts))
            begins = max(one.token_times_s[0] for one in answers)
            ends = min(one.token_times_s[-1] for one in answers)
            gaps = [later - one for one, later in _pairs(answers[0]) if begins < one and later < ends]
            if len(gaps) >= TOKENS // 3:
                found.append(statistics.median(gaps))
        if found:
            work = StepWork(0, 0.0, number, number * (context + tokens // 2))
            self.steps.append(StepSample(work, statistics.median(found)))

    async def _prefill(self, length: int) -> None:
        """The prefill of one prompt on an idle instance, and the transfer of its KV, if there is a router."""
        seconds, transfers = [], []
        for _ in range(REPEATS):
            await asyncio.sleep(PAUSE_S)
            answer = await (self.router or self.instance).ask(self.texts.prompt(length), 2)
            seconds.append(_span(answer, "prefill_started", "prefill_done"))
            if answer.timeline.transfer_done is not None:
                transfers.append(_span(answer, "transfer_started", "transfer_done"))
        work = StepWork(length, length * (length + 1) / 2, 0, length)
        self.steps.append(StepSample(work, statistics.median(seconds)))
        if transfers:
            self.transfers.append((length * self.token_bytes, statistics.median(transfers)))

    async def _beside(self, length: int) -> None:
        """The prefill of a prompt in a step with others that decode: the longest gap of one of these."""
        number, context = 4, 32
        if self.limits.max_num_seqs < 8:
            return
        found = []
        for _ in range(REPEATS):
            streams = [
                asyncio.create_task(self.instance.ask(self.texts.prompt(context), 3 * TOKENS)) for _ in range(number)
            ]
            asked = SYSTEM_CLOCK.monotonic()
            late = asyncio.create_task(self._after(asked, length))
            answers = [await one for one in streams]
            span = _span(await late, "prefill_started", "prefill_done")
            longest = max((later - one for one, later in _pairs(answers[0])), default=0.0)
            if span <= longest < 3 * span:
                found.append(longest)
        if found:
            others = number * (context + TOKENS)
            work = StepWork(length, length * (length + 1) / 2, number, length + others)
            self.steps.append(StepSample(work, statistics.median(found)))

    async def _after(self, asked: float, length: int) -> DemoAnswer:
        """Ask in the middle of the streams: when a third of their time, as fitted so far, is over."""
        so_far = [one.seconds for one in self.steps if one.work.decode_sequences == 4]
        await asyncio.sleep(asked + TOKENS * (so_far[0] if so_far else 0.01) - SYSTEM_CLOCK.monotonic())
        return await self.instance.ask(self.texts.prompt(length), 1)

    async def _overheads(self) -> tuple[float, float]:
        """What a short request takes besides its prefill: that of an instance alone, and that of each hop, one way,
        from what a router adds to it."""
        direct = await self._overhead(self.instance)
        if self.router is None:
            return direct, TransferTimes().latency_s
        hop_s = max(0.0, await self._overhead(self.router) - direct) / 2
        return max(0.0, direct - 2 * hop_s), hop_s

    async def _overhead(self, endpoint: Endpoint) -> float:
        seconds = []
        for _ in range(4 * REPEATS):
            await asyncio.sleep(PAUSE_S)
            answer = await endpoint.ask(self.texts.prompt(PROMPTS[0]), 1)
            ttft_s = answer.token_times_s[0] - answer.asked_s
            seconds.append(ttft_s - _span(answer, "prefill_started", "prefill_done"))
        return max(0.0, statistics.median(seconds))

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one token in all layers on all ranks."""
        return token_bytes(self.limits.facts.kv_layout)

    def times(self, model: str, day: str, start_s: float, settings: dict[str, str]) -> MachineTimes:
        """What was measured on this day. Raises `ConfigError` if it was too little."""
        facts = self.limits.facts
        step, error = fit_steps(self.steps)
        layout = facts.kv_layout
        assert layout is not None
        bandwidth, whole_s = fit_transfer(self.transfers) if self.transfers else (TransferTimes().bandwidth, 0.0)
        read_s = max(0.0, whole_s - 2 * self.hop_s)  # a question and its answer come before the bytes
        return MachineTimes(
            model=model,
            machine=this_machine(),
            measured=day,
            step=msgspec.structs.replace(step, request_s=self.request_s),
            step_error=error,
            kv=KVSize(len(layout.layers), self.token_bytes, facts.num_kv_tokens, facts.block_size),
            transfer=TransferTimes(self.hop_s, bandwidth, read_s, self.transfers),
            start_s=start_s,
            max_model_len=facts.max_model_len,
            tensor_parallel_size=facts.tp_size,
            settings=settings,
            samples=self.steps,
        )


def token_bytes(layout: KVLayout | None) -> int:
    """Bytes of the KV of one token in all layers. Raises `ConfigError` if the layout is not known."""
    if layout is None:
        raise ConfigError("the instance does not say how its KV is laid out; give it a connector")
    return sum(one.whole_kv_heads * (one.key_dim + one.value_dim) * DTYPE_BYTES[layout.dtype] for one in layout.layers)


async def facts_of(server: Server) -> InstanceFacts:
    """What an instance says about itself. Raises `KvferryError`."""
    return await server.ask("GET", "/kvferry/instance", None, InstanceFacts)


def this_machine() -> str:
    """The processor's name, and how many cores this process may use."""
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {len(os.sched_getaffinity(0))} cores"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _pairs(answer: DemoAnswer) -> Iterator[tuple[float, float]]:
    return zip(answer.token_times_s, answer.token_times_s[1:], strict=False)


def _span(answer: DemoAnswer, start: str, end: str) -> float:
    span = answer.timeline.span(start, end)
    if span is None:
        raise ConfigError("the server does not stamp when it prefills; only instances of kvferry's can be measured")
    return span
