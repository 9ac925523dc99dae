"""One worker of Dynamo's as an engine: `engine.server` speaks OpenAI's API for it.

Texts become tokens here, and tokens texts; the worker gets and gives token ids. A ticket has, beside what kvferry's own
tickets have, the `disaggregated_params` that a prefill worker answered with; the decode worker gets them as they were.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from typing import Any, Literal

from kvferry.bridge.dynamo.card import ModelCard
from kvferry.bridge.dynamo.event_relay import NO_EVENTS, KVEvents
from kvferry.bridge.dynamo.messages import WorkerOutput, worker_request
from kvferry.bridge.dynamo.model import ModelFiles
from kvferry.bridge.dynamo.runtime import WorkerClient, WorkerLost
from kvferry.bridge.dynamo.system_server import SystemServer, WorkerLoad
from kvferry.bridge.dynamo.worker_link import DEFAULT_DEADLINES, WorkerDeadlines, WorkerLink
from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import HandOffFailed, InvalidRequest, RequestError
from kvferry.core.messages.dynamo import CONNECTOR, DynamoEndpoint
from kvferry.core.messages.hand_off import (
    OTHER_PROMPT,
    Consume,
    HandOff,
    PrefillResult,
    Produce,
    Ticket,
    prefix_digests,
)
from kvferry.core.messages.instance_facts import InstanceFacts, TicketKinds
from kvferry.core.messages.kept import KeptBlocks
from kvferry.core.messages.ticket_seal import TicketSealer
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams, sampling_digest
from kvferry.engine.blocks.block_pool import BlockPoolStatistics
from kvferry.engine.scheduling.external_kv import ExternalKVStatistics
from kvferry.engine.scheduling.scheduler import SchedulerStatistics
from kvferry.engine.statistics import EngineSnapshot

logger = logging.getLogger(__name__)

_ALONE = "x-bypass-remote-prefill"
"""Dynamo's annotation with which a decode worker computes a prompt itself."""
_ONE_TOKEN = Request(request_id="", prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1, temperature=0.0))


class DynamoWorker:
    """An `EngineClient`. `lease_s`: how long its tickets are valid."""

    def __init__(
        self,
        client: WorkerClient,
        worker_id: int,
        card: ModelCard,
        model: ModelFiles,
        *,
        token: str = "",
        kv_events: KVEvents = NO_EVENTS,
        system: SystemServer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        lease_s: float = 480.0,
        deadlines: WorkerDeadlines = DEFAULT_DEADLINES,
    ) -> None:
        self._card, self._role = card, _role_of(card, client.endpoint)
        self.kv_events, self._clock, self._lease_s = kv_events, clock, lease_s
        self.system, self._sealer = system, TicketSealer(token, clock)
        self._num_running = 0
        context = card.context_length or card.runtime_config.context_length or card.architectural_max_context_length
        self.max_model_len = min(context or model.max_position, model.max_position)
        self.vocab_size, self.tokenizer = model.vocab_size, model.tokenizer
        self.eos_token_ids, self.default_sampling = model.eos_token_ids, model.default_sampling
        one_token = {**self._message(_ONE_TOKEN), "annotations": [_ALONE]}
        self._link = WorkerLink(client, worker_id, model.vocab_size, one_token, deadlines)
        self.engine_id = f"{self._link.name}.{entropy.token_hex(8)}"

    @property
    def model_names(self) -> tuple[str]:
        """The name in the model's card."""
        return (self._card.display_name,)

    @property
    def model_identity(self) -> str:
        """Digest of the model's card."""
        return f"dynamo:{self._card.digest or self._card.source_path}"

    @property
    def healthy(self) -> bool:
        """True if the worker takes requests, and its system server, if any, says so."""
        return self._link.healthy and (self.system is None or self.system.healthy)

    def leave(self) -> None:
        """Record that Dynamo's discovery no longer has the worker."""
        self._link.leave()

    def describe(self) -> InstanceFacts:
        """The facts that a router needs."""
        card, role = self._card, self._role
        block_size = card.kv_cache_block_size or 0
        hands_off = role != "both"
        return InstanceFacts(
            stack="dynamo",
            role=role,
            engine_id=self.engine_id,
            process=self.engine_id,
            connector=CONNECTOR if hands_off else None,
            tickets=TicketKinds(writes=("dynamo",), reads=("dynamo",))
            if hands_off
            else TicketKinds(writes=(), reads=()),
            layout=self.model_identity,
            num_kv_tokens=(card.runtime_config.total_kv_blocks or 0) * block_size,
            block_size=block_size,
            kv_events=self.kv_events.address,
            max_model_len=self.max_model_len,
            max_num_seqs=card.runtime_config.max_num_seqs or 0,
            model_names=list(self.model_names),
        )

    def continues(self, sampling: SamplingParams, *, is_seeded: bool) -> bool:
        """An answer goes on elsewhere from its tokens, as a longer prompt. So it must not depend on how many of them
        were drawn before."""
        counts = sampling.presence_penalty or sampling.frequency_penalty
        return not counts and not (is_seeded and sampling.temperature)

    # Requests.

    async def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        """Serve a request. Raises `RequestError`."""
        message = self._message(request)
        cached = self._add_hand_off(request, message)
        self.kv_events.sent(message["token_ids"])
        self._num_running += 1
        try:
            if isinstance(request.hand_off, Produce):
                yield await self._prefill(request, request.hand_off, message)
                return
            async for output in self._decode(request, message, cached):
                yield output
        finally:
            self._num_running -= 1

    def _message(self, request: Request) -> dict[str, Any]:
        return worker_request(request, self._card.display_name, self.eos_token_ids)

    def _add_hand_off(self, request: Request, message: dict[str, Any]) -> int:
        """Add to the message what the worker needs of the hand-off; returns how many tokens P had cached."""
        match request.hand_off:
            case Produce():
                return 0
            case Consume(ticket=ticket) if ticket.disaggregated_params:
                self._check(ticket, request)
                result = ticket.prefill_result
                num_cached = result.num_cached_tokens if result is not None else 0
                if result is not None:
                    request.timeline.adopt(result.timeline)
                request.timeline.stamp("transfer_started", self._clock.wall())
                message["prefill_result"] = _prefill_result(ticket, num_cached)
                return num_cached
        if self._role == "prefill":
            raise InvalidRequest("a prefill worker of Dynamo's computes prompts only; ask a decode worker")
        message["annotations"] = [_ALONE]
        return 0

    def _check(self, ticket: Ticket, request: Request) -> None:
        """Raise `HandOffFailed` for a ticket that no worker of this deployment wrote, and `InvalidRequest` for one of
        another prompt."""
        refusal = self._sealer.refusal(ticket, connects=False)
        if refusal is None and ticket.prefill_result is None:
            refusal = HandOffFailed("the ticket is not sealed")
        if refusal is not None:
            raise HandOffFailed(f"the ticket is refused: {refusal}")
        if not ticket.is_of(request.prompt_token_ids, request.cache_salt):
            raise InvalidRequest(OTHER_PROMPT, param="kv_transfer_params")

    async def _prefill(self, request: Request, hand_off: Produce, message: dict[str, Any]) -> EngineOutput:
        request.timeline.stamp("prefill_started", self._clock.wall())
        params: Any = None
        tokens, num_cached, finished = list[int](), 0, None
        async for output in self._link.outputs(message):
            tokens += output.token_ids
            params = output.disaggregated_params if output.disaggregated_params is not None else params
            num_cached = output.num_cached_tokens or num_cached
            finished = output.finished or finished
        if not tokens or finished == "error":
            raise WorkerLost(f"{self._link.name} ended a prefill without a token")
        request.timeline.stamp("prefill_done", self._clock.wall())
        ticket = self._ticket(request, hand_off, params, tokens[0], num_cached) if params is not None else None
        return EngineOutput(
            request_id=request.request_id,
            token_ids=tokens[:1],
            finish_reason=finished or "length",  # vLLM's prefill workers give none
            num_cached_tokens=num_cached,
            kv_transfer_params=ticket,
            timeline=request.timeline,
        )

    def _ticket(
        self, request: Request, hand_off: Produce, params: Any, first_token: int, num_cached: int
    ) -> dict[str, Any]:
        prompt = request.prompt_token_ids
        ticket = Ticket(
            transfer_id=hand_off.transfer_id,
            remote_engine_id=self.engine_id,
            remote_num_tokens=len(prompt),
            remote_prefixes=prefix_digests(prompt, [len(prompt)], request.cache_salt),
            disaggregated_params=json.dumps(params, separators=(",", ":")),
            prefill_result=PrefillResult(
                first_token=first_token,
                num_cached_tokens=num_cached,
                drawn_by=sampling_digest(self.model_identity, request.sampling, self.eos_token_ids),
                timeline=request.timeline,
            ),
        )
        return self._sealer.seal(ticket, self._lease_s).to_params()

    async def _decode(self, request: Request, message: dict[str, Any], num_cached: int) -> AsyncIterator[EngineOutput]:
        timeline, ends = request.timeline, self._ends_of(request.sampling)
        timeline.stamp("decode_queued", self._clock.wall())
        held: EngineOutput | None = None
        async with aclosing(self._link.outputs(message)) as worker_outputs:
            async for worker_output in worker_outputs:
                if worker_output.num_cached_tokens is not None and request.hand_off is None:
                    num_cached = worker_output.num_cached_tokens
                if timeline.first_token is None and worker_output.token_ids:
                    now = self._clock.wall()
                    for phase in ("transfer_done", "decode_started") if request.hand_off is not None else ():
                        timeline.stamp(phase, now)
                    timeline.stamp("first_token", now)
                output = _output(request, worker_output, num_cached)
                if held is not None:
                    output, held = _joined(held, output), None
                if output.finish_reason is None and output.token_ids and output.token_ids[-1] in ends:
                    held = output  # a token that ends the answer, the reason for which comes with the next output
                    continue
                if output.finish_reason is not None:
                    await self._link.drain(worker_outputs)
                    yield output
                    return
                yield output
        raise WorkerLost(f"{self._link.name} ended an answer in the middle")

    def _ends_of(self, sampling: SamplingParams) -> Collection[int]:
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}

    # Other methods of an engine.

    async def release(self, transfer_id: str) -> bool:
        """False: prefill workers have no message for it; a decode worker releases the ticket (`refused`)."""
        return False

    def refused(self, hand_off: HandOff) -> None:
        """A request was refused before `generate`: have the worker take the KV that its ticket names, and drop it, as P
        holds it until then. Returns at once."""
        if isinstance(hand_off, Consume) and hand_off.ticket.disaggregated_params and self._role != "prefill":
            self._link.run_in_background(self._abandon(hand_off.ticket))

    async def _abandon(self, ticket: Ticket) -> None:
        if self._sealer.refusal(ticket, connects=False) is not None:
            return
        message = self._message(_ONE_TOKEN)
        message["prefill_result"] = _prefill_result(ticket, 0)
        try:
            async with aclosing(self._link.outputs(message)) as outputs:
                async for _ in outputs:
                    pass
        except RequestError as error:
            logger.info("a hand-off is left to its lease: %s", error)

    async def stored_blocks(self, request: Request, *, pin: bool | None) -> KeptBlocks:
        """Raises `InvalidRequest`: Dynamo's workers do not report the content of their stores."""
        raise InvalidRequest("Dynamo's workers do not tell what their stores have")

    async def reset_prefix_cache(self) -> bool:
        """Raises `InvalidRequest`: Dynamo's workers reset their caches themselves."""
        raise InvalidRequest("Dynamo's workers have no request that resets their prefix caches")

    def abort_requests(self, request_ids: Collection[str]) -> int:
        """Raises `InvalidRequest`: Dynamo's frontends end their requests."""
        raise InvalidRequest("requests of Dynamo's workers are aborted by their clients only")

    async def statistics(self) -> EngineSnapshot:
        """The engine's load by the worker's system server; without one, the requests of this process. Steps are
        outputs of the worker."""
        block_size = self._card.kv_cache_block_size or 1
        num_blocks = (self._card.runtime_config.total_kv_blocks or 0) if block_size else 0
        load = None if self.system is None else self.system.load
        if load is None:
            load = WorkerLoad(num_running=self._num_running)
        return EngineSnapshot(
            scheduler=SchedulerStatistics(num_running=load.num_running, num_waiting=load.num_waiting),
            external_kv=ExternalKVStatistics(),
            blocks=BlockPoolStatistics(num_blocks=num_blocks, num_free=round(num_blocks * (1.0 - load.kv_usage))),
            num_steps=self._link.num_outputs,
        )

    async def check(self) -> None:
        """Nothing is held here."""

    async def close(self) -> None:
        """End the background tasks."""
        await self._link.close()


def _role_of(card: ModelCard, endpoint: DynamoEndpoint) -> Literal["prefill", "decode", "both"]:
    match card.worker_type:
        case "prefill" | "decode" as role:
            return role
        case None:
            return endpoint.role
    return "both"


def _prefill_result(ticket: Ticket, num_cached: int) -> dict[str, Any]:
    try:
        params = json.loads(ticket.disaggregated_params)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"disaggregated_params: {error}", param="kv_transfer_params") from error
    return {"disaggregated_params": params, "prompt_tokens_details": {"cached_tokens": num_cached}}


def _output(request: Request, worker_output: WorkerOutput, num_cached: int) -> EngineOutput:
    if worker_output.finished == "error":
        raise WorkerLost(f"the worker ended the request: {worker_output.finish_reason}")
    return EngineOutput(
        request_id=request.request_id,
        token_ids=worker_output.token_ids,
        logprobs=worker_output.logprobs(),
        finish_reason=worker_output.finished,
        stop_reason=worker_output.stop_reason,
        num_cached_tokens=num_cached,
        timeline=request.timeline if worker_output.finished else None,
    )


def _joined(held: EngineOutput, output: EngineOutput) -> EngineOutput:
    output.token_ids = [*held.token_ids, *output.token_ids]
    output.logprobs = [*held.logprobs, *output.logprobs]
    return output
