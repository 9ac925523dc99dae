"""Times of a real engine, measured over HTTP with short requests, for `kvferry calibrate`.

Steps that decode are timed by the gaps between tokens of streams that run side by side; those that prefill, by the
stamps of an instance's timeline. So the cost of a step is the time until the next step, which includes the time of
Python and HTTP on the instance's core.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar

import msgspec

from kvferry.cli.cache.warming import Server
from kvferry.cli.demo.requests import DemoAnswer, DemoPrompt, Endpoint
from kvferry.core.blocks.layout import DTYPE_BYTES, KVLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.host.machine import num_cpus
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.sim.fit import fit_steps, fit_transfer, spread
from kvferry.sim.times import KVSize, MachineTimes, StepSample, StepWork, TransferTimes

STREAMS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32, 256, 1024)
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
TOKENS = 24
"""Tokens of each timed stream."""
_TEXTS = ("tarfile.py", "typing.py", "subprocess.py", "pickle.py", "inspect.py", "argparse.py")


@dataclass(frozen=True)
class InstanceLimits:
    """The limits that an instance reports."""

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

    def prompts(self) -> list[int]:
        """Lengths of prompts that fit."""
        return [length for length in PROMPTS if self._fits(length + 2, 1)]

    def num_steps(self, length: int) -> int:
        """Number of steps in which a prompt is prefilled."""
        return max(1, -(-length // self.max_num_batched_tokens))

    def _fits(self, length: int, number: int) -> bool:
        facts = self.facts
        return length < facts.max_model_len and number * (length + facts.block_size) < facts.num_kv_tokens


class PromptGenerator:
    """Prompts of any length that share no prefix: tokens of Python's own library, in an order that `seed` decides."""

    def __init__(self, token_ids: list[int], seed: int) -> None:
        self._token_ids, self._random = token_ids, Random(seed)

    @classmethod
    async def read(cls, endpoint: Endpoint, max_model_len: int, seed: int) -> PromptGenerator:
        """Tokenize the texts with the model's own tokenizer, in chunks that it accepts."""
        token_ids: list[int] = []
        for name in _TEXTS:
            text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
            length = min(len(text), max_model_len // 2)
            token_ids += (await endpoint.post("/tokenize", {"prompt": text[:length]}))["tokens"]
        return cls(token_ids, seed)

    def prompt(self, num_tokens: int) -> DemoPrompt:
        """The next prompt."""
        return DemoPrompt("", self._random.choices(self._token_ids, k=num_tokens), "")


@dataclass
class Calibration:
    """One run. `instance`: the instance that is measured alone; `prefill`, `router`: P, and the router in front of P
    and of `instance`, which is then D; None: there are none."""

    max_streams: ClassVar[int] = 4
    """Maximum number of streams. With more, router and client read several tokens at a time, which is rare
    otherwise."""
    pause_s: ClassVar[float] = 0.2
    """Seconds of load before each measurement. On some machines, a processor that was idle is by a third slower than
    one that was busy for a while, as it is under most traffic."""

    instance: Endpoint
    prefill: Endpoint | None
    router: Endpoint | None
    limits: InstanceLimits
    texts: PromptGenerator
    on_progress: Callable[[float], None]
    cpu_s: Callable[[], float] | None = None
    """CPU seconds of the router and of this process, which is its client."""
    steps: dict[StepWork, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each step that was measured, by what it computed."""
    transfers: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds in which D has fetched KV that P had computed, by number of bytes."""
    after_prefill_s: list[float] = field(default_factory=list)
    """From the end of a prefill until D, which waited for it, has the first token."""
    alone_s: list[float] = field(default_factory=list)
    """Seconds that a short request to an instance takes besides its prefill."""
    routed_s: list[float] = field(default_factory=list)
    """The same for a request through the router."""
    read_s: list[tuple[float, int]] = field(default_factory=list)
    """CPU seconds of router and client, by number of tokens."""
    _num_done: int = 0

    async def measure(self, rounds: int) -> None:
        """Measure everything in rounds, so that a temporary load of the machine affects all measurements alike."""
        streams, prompts = list(self.limits.streams()), self.limits.prompts()
        if not streams or not prompts:
            raise ConfigError("the instance's KV cache, or its model's longest context, is too small to measure it")
        total = rounds * (len(streams) + 3 * len(prompts))
        for length in prompts:  # the first ones are slow
            await self._prefill(length)
        self.steps.clear()
        self.after_prefill_s.clear()
        for _ in range(rounds):
            for number, context in streams:
                await self._decode(number, context)
                self._progress(total)
            for length in prompts:
                await self._prefill(length)
                await self._transfer(length)
                if (
                    length > prompts[0] and self.limits.num_steps(length) == 1
                ):  # otherwise, it may not be the longest gap
                    await self._beside(length)
                await self._overheads()
                self._progress(total, 3)
        self.on_progress(1.0)

    def _progress(self, total: int, number: int = 1) -> None:
        self._num_done += number
        self.on_progress(self._num_done / total)

    async def _decode(self, number: int, context: int) -> None:
        """The gaps of one of `number` streams, while all run; through the router, if there is one, so that they are
        steps of an instance that waited for its KV."""
        endpoint = self.router or self.instance
        tokens = TOKENS + 2 * number  # the streams begin one after the other
        prompts = [self.texts.prompt(context) for _ in range(number)]
        await asyncio.sleep(self.pause_s)
        before = self.cpu_s() if self.cpu_s is not None else 0.0
        answers = await asyncio.gather(*(endpoint.ask(prompt, tokens) for prompt in prompts))
        if self.cpu_s is not None and number <= self.max_streams:
            self.read_s.append((self.cpu_s() - before, number * tokens))
        begins = max(prompt.token_times_s[0] for prompt in answers)
        ends = min(prompt.token_times_s[-1] for prompt in answers)
        gaps = [later - prompt for prompt, later in _pairs(answers[0]) if begins < prompt and later < ends]
        if len(gaps) >= TOKENS // 3:
            self.steps[StepWork(0, 0.0, number, number * (context + tokens // 2))] += gaps

    async def _prefill(self, length: int) -> None:
        """The prefill of one prompt on an idle instance; if there is a router, handed off to D, which waits for it."""
        await asyncio.sleep(self.pause_s)
        answer = await (self.router or self.instance).ask(self.texts.prompt(length), 2)
        ends = (
            min(length, (index + 1) * self.limits.max_num_batched_tokens)
            for index in range(self.limits.num_steps(length))
        )
        work = StepWork(length, length * (length + 1) / 2, 0, sum(ends))  # the context is read in each step
        self.steps[work].append(_span(answer, "prefill_started", "prefill_done"))
        if answer.timeline.transfer_done is not None:
            self.after_prefill_s.append(_span(answer, "prefill_done", "first_token"))

    async def _transfer(self, length: int) -> None:
        """The transfer of a prompt's KV, which begins when P has computed it."""
        if self.prefill is None:
            return
        await asyncio.sleep(self.pause_s)
        prompt = self.texts.prompt(length)
        produced = await self.prefill.ask(prompt, 1, kv_transfer_params={"do_remote_decode": True})
        answer = await self.instance.ask(prompt, 2, kv_transfer_params=produced.kv_transfer_params)
        self.transfers[length * self.token_bytes].append(_span(answer, "transfer_started", "transfer_done"))

    async def _beside(self, length: int) -> None:
        """Measure the prefill of a prompt in a step with decoding streams: the longest gap of a stream."""
        number, context = 4, 32
        if self.limits.max_num_seqs < 8:
            return
        streams = [
            asyncio.create_task(self.instance.ask(self.texts.prompt(context), 3 * TOKENS)) for _ in range(number)
        ]
        sent_at = SYSTEM_CLOCK.monotonic()
        late = asyncio.create_task(self._after(sent_at, length))
        answers = [await stream for stream in streams]
        span = _span(await late, "prefill_started", "prefill_done")
        longest = max((later - stream for stream, later in _pairs(answers[0])), default=0.0)
        if span <= longest < 3 * span:
            work = StepWork(length, length * (length + 1) / 2, number, length + number * (context + TOKENS))
            self.steps[work].append(longest)

    async def _after(self, sent_at: float, length: int) -> DemoAnswer:
        """Send a request in the middle of the streams: when a third of their time, as measured so far, has passed."""
        so_far = [statistics.median(seconds) for work, seconds in self.steps.items() if work.decode_sequences == 4]
        await asyncio.sleep(sent_at + TOKENS * (so_far[0] if so_far else 0.01) - SYSTEM_CLOCK.monotonic())
        return await self.instance.ask(self.texts.prompt(length), 1)

    async def _overheads(self) -> None:
        """Measure the overhead of a short request besides its prefill, of an instance alone and behind a router."""
        for endpoint, durations in ((self.instance, self.alone_s), (self.router, self.routed_s)):
            if endpoint is not None:
                await asyncio.sleep(self.pause_s)
                answer = await endpoint.ask(self.texts.prompt(PROMPTS[0]), 1)
                ttft_s = answer.token_times_s[0] - answer.asked_s
                durations.append(ttft_s - _span(answer, "prefill_started", "prefill_done"))

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one token in all layers on all ranks."""
        return token_bytes(self.limits.facts.kv_layout)

    def _transfer_times(self) -> TransferTimes:
        """One network hop is half of the time that a router adds to a request. The news of the end of a prefill takes
        one message between connectors, and one wake-up on each side. A transfer takes these and four more messages: D's
        request, the read, and the fence with its answer."""
        if not (self.routed_s and self.transfers and self.after_prefill_s):
            return TransferTimes()
        hop_s = max(0.0, statistics.median(self.routed_s) - statistics.median(self.alone_s)) / 2
        samples = [(float(size), statistics.median(seconds)) for size, seconds in self.transfers.items()]
        bandwidth, whole_s = fit_transfer(samples)
        after_prefill_s = statistics.median(self.after_prefill_s)
        peer_s = max(0.0, whole_s - after_prefill_s) / 4
        wake_s = max(0.0, after_prefill_s - peer_s) / 2
        read_s, num_read = map(sum, zip(*self.read_s, strict=True)) if self.read_s else (0.0, 1)
        return TransferTimes(hop_s, peer_s, wake_s, read_s / num_read, bandwidth, samples)

    def times(self, model: str, day: str, start_s: float, settings: dict[str, str]) -> MachineTimes:
        """The measurements as machine times. Raises `ConfigError` if there are too few."""
        facts = self.limits.facts
        samples = [
            StepSample(work, statistics.median(seconds), self.limits.num_steps(work.prefill_tokens))
            for work, seconds in self.steps.items()
        ]
        step, error = fit_steps(samples)
        layout = facts.kv_layout
        assert layout is not None
        transfer = self._transfer_times()
        step = msgspec.structs.replace(
            step,
            request_s=max(0.0, statistics.median(self.alone_s) - 2 * transfer.latency_s),
            decode_spread=spread(self.steps, prefill=False),
            prefill_spread=spread(self.steps, prefill=True),
        )
        return MachineTimes(
            model=model,
            machine=this_machine(),
            measured=day,
            step=step,
            step_error=error,
            kv=KVSize(len(layout.layers), self.token_bytes, facts.num_kv_tokens, facts.block_size),
            transfer=transfer,
            start_s=start_s,
            max_model_len=facts.max_model_len,
            tensor_parallel_size=facts.tp_size,
            settings=settings,
            samples=samples,
        )


def token_bytes(layout: KVLayout | None) -> int:
    """Bytes of the KV of one token in all layers. Raises `ConfigError` if the layout is not known."""
    if layout is None:
        raise ConfigError("the instance does not say how its KV is laid out; give it a connector")
    return sum(
        layer.model_kv_heads * (layer.key_dim + layer.value_dim) * DTYPE_BYTES[layout.dtype] for layer in layout.layers
    )


async def facts_of(server: Server) -> InstanceFacts:
    """Fetch the facts of an instance. Raises `KvferryError`."""
    return await server.ask("GET", "/kvferry/instance", None, InstanceFacts)


def this_machine() -> str:
    """The processor's name, and how many cores this process may use."""
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {num_cpus()} cores"


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
