"""Engines that compute nothing, for what only the HTTP layer decides.

`DeterministicEngine` is a little language model made of hashes, which keeps every promise of `EngineClient`.
`ScriptedEngine` does as it is told, at the moment it is told.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.errors import InvalidRequest, LeakError
from kvferry.core.messages.hand_off import HandOff, PrefillResult, Produce, Ticket, TokenLogprobs
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.messages.kept import KeptBlocks
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams, uniform_draw
from kvferry.engine.blocks.block_pool import BlockPoolStatistics
from kvferry.engine.scheduling.external_kv import ExternalKVStatistics
from kvferry.engine.scheduling.scheduler import SchedulerStatistics
from kvferry.engine.statistics import EngineSnapshot

NUM_CANDIDATES = 20


class FakeEngine:
    """What both have in common. `requests` are all that came, `running` those that have not ended."""

    def __init__(self, tokenizer: Any, *, max_model_len: int = 2048) -> None:
        self.model_names: Sequence[str] = ("test-model", "its-other-name")
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.engine_id, self.model_identity = "engine", "model"
        self.eos_token_ids = frozenset({tokenizer.eos_token_id})
        self.default_sampling: dict[str, Any] = {}
        self.healthy = True
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.leases: set[str] = set()
        self.refusals: list[HandOff] = []
        self.leak: str | None = None
        self.ended = asyncio.Event()

    def describe(self) -> InstanceFacts:
        return InstanceFacts(connector="its-connector", model_names=list(self.model_names))

    async def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        self.running.add(request.request_id)
        finished = False
        try:
            async for output in self.outputs(request):
                finished = output.finish_reason is not None
                yield output
        except Exception:
            finished = True
            raise
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)
            self.ended.set()

    def outputs(self, request: Request) -> AsyncIterator[EngineOutput]:
        raise NotImplementedError

    async def release(self, transfer_id: str) -> bool:
        known = transfer_id in self.leases
        self.leases.discard(transfer_id)
        return known

    def continues(self, sampling: SamplingParams, *, is_seeded: bool) -> bool:
        return True

    def refused(self, hand_off: HandOff) -> None:
        self.refusals.append(hand_off)

    async def stored_blocks(self, request: Request, *, pin: bool | None) -> KeptBlocks:
        raise InvalidRequest("nothing is kept here")

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    def abort_requests(self, request_ids: Collection[str]) -> int:
        self.aborted += request_ids or sorted(self.running)
        return len(request_ids or self.running)

    async def statistics(self) -> EngineSnapshot:
        return EngineSnapshot(
            SchedulerStatistics(num_running=len(self.running)),
            ExternalKVStatistics(num_held=len(self.leases), num_loading=1, num_load_failures={"PeerLost": 2}),
            BlockPoolStatistics(100, 75, 0, 0),
            num_steps=7,
            connector={"bytes sent": 12.0},
        )

    async def check(self) -> None:
        if self.leak is not None:
            raise LeakError(self.leak)


class DeterministicEngine(FakeEngine):
    """The next token depends on the last three and, when sampled, on seed and position."""

    async def outputs(self, request: Request) -> AsyncIterator[EngineOutput]:
        tokens, sampling = [*request.prompt_token_ids, *request.answer_token_ids], request.sampling
        request.timeline.stamp("prefill_started", 1.0)
        for count in range(len(request.answer_token_ids) + 1, sampling.max_tokens + 1):
            await asyncio.sleep(0)
            place = self.choose(request, tokens, count)
            tokens.append(place.token_id)
            yield self.output(request, tokens, count, place)
            if self.reason(request, place.token_id, count) is not None:
                return

    def output(self, request: Request, tokens: list[int], count: int, place: TokenLogprobs) -> EngineOutput:
        sampling, reason = request.sampling, self.reason(request, place.token_id, count)
        output = EngineOutput(
            request_id=request.request_id,
            token_ids=[place.token_id],
            logprobs=[] if sampling.logprobs is None else [place],
            finish_reason=reason,
            stop_reason=place.token_id if place.token_id in sampling.stop_token_ids else None,
            num_cached_tokens=len(request.prompt_token_ids) // 16 * 16,
        )
        if count == 1 and sampling.prompt_logprobs is not None:
            prompt = request.prompt_token_ids
            output.prompt_logprobs = [None, *(self.place(prompt[:at], prompt[at]) for at in range(1, len(prompt)))]
        if reason is not None:
            output.timeline = request.timeline
            output.kv_transfer_params = self.ticket(request, place.token_id)
        return output

    def ticket(self, request: Request, first_token: int) -> dict[str, Any] | None:
        if not isinstance(request.hand_off, Produce):
            return None
        self.leases.add(request.hand_off.transfer_id)
        result = PrefillResult(first_token=first_token, seed=request.sampling.seed or 0)
        return Ticket(transfer_id=request.hand_off.transfer_id, prefill_result=result).to_params()

    def reason(self, request: Request, token_id: int, count: int) -> Any:
        sampling = request.sampling
        if count >= sampling.min_tokens:
            eos = token_id in self.eos_token_ids and not sampling.ignore_eos
            if eos or token_id in sampling.stop_token_ids:
                return "stop"
        return "length" if count == sampling.max_tokens else None

    def choose(self, request: Request, tokens: list[int], count: int) -> TokenLogprobs:
        sampling = request.sampling
        ranked = self.ranked(tokens, sampling.logit_bias)
        pick = 0
        if sampling.temperature > 0:
            pick = int(uniform_draw(sampling.seed or 0, len(tokens)) * len(ranked))
        return self.place(tokens, ranked[pick], sampling.logit_bias, sampling.logprobs or 0)

    def place(
        self, tokens: list[int], token_id: int, bias: dict[int, float] | None = None, top: int = 3
    ) -> TokenLogprobs:
        ranked = self.ranked(tokens, bias or {})
        rank = ranked.index(token_id) if token_id in ranked else NUM_CANDIDATES
        likeliest = {other: self.logprob(at) for at, other in enumerate(ranked[:top])}
        return TokenLogprobs(token_id, self.logprob(rank), rank + 1, likeliest)

    @staticmethod
    def logprob(rank: int) -> float:
        return math.log(0.5) * (rank + 1) if rank < NUM_CANDIDATES else -math.inf

    def ranked(self, tokens: list[int], bias: dict[int, float]) -> list[int]:
        digest = hashlib.blake2b(repr(tokens[-3:]).encode(), digest_size=2 * NUM_CANDIDATES).digest()
        places = range(0, 2 * NUM_CANDIDATES, 2)
        vocab_size = len(self.tokenizer)
        candidates = dict.fromkeys(int.from_bytes(digest[at : at + 2], "little") % vocab_size for at in places)
        return sorted([*bias, *(one for one in candidates if one not in bias)], key=lambda one: -bias.get(one, 0.0))


class WritingEngine(DeterministicEngine):
    """Answers each request with the next of `texts`, the last one again and again, and ends as a model does."""

    def __init__(self, tokenizer: Any, *texts: str, **settings: Any) -> None:
        super().__init__(tokenizer, **settings)
        self.texts = list(texts)

    async def outputs(self, request: Request) -> AsyncIterator[EngineOutput]:
        text = self.texts[0] if len(self.texts) == 1 else self.texts.pop(0)
        answer = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        for count in range(len(request.answer_token_ids) + 1, min(len(answer), request.sampling.max_tokens) + 1):
            await asyncio.sleep(0)
            tokens = [*request.prompt_token_ids, *answer[: count - 1]]
            yield self.output(request, tokens, count, self.place(tokens, answer[count - 1]))
            if self.reason(request, answer[count - 1], count) is not None:
                return


@dataclass
class Gate:
    """A step of a script: wait until it is opened; `reached` tells that the engine waits."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)


Step = EngineOutput | Exception | Gate


class ScriptedEngine(FakeEngine):
    """Plays `script` for every request: yields outputs, raises exceptions, waits at gates."""

    def __init__(self, tokenizer: Any, script: Sequence[Step] = (), **settings: Any) -> None:
        super().__init__(tokenizer, **settings)
        self.script = list(script)

    async def outputs(self, request: Request) -> AsyncIterator[EngineOutput]:
        for step in self.script:
            if isinstance(step, Gate):
                step.reached.set()
                await step.opened.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step
