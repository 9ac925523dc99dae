"""A worker of Dynamo's as an engine: what it is sent, and what becomes of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.bridge.dynamo.card import ModelCard
from kvferry.bridge.dynamo.model import ModelFiles
from kvferry.bridge.dynamo.runtime import WorkerLost
from kvferry.bridge.dynamo.worker import DynamoWorker
from kvferry.bridge.dynamo.worker_link import WorkerDeadlines
from kvferry.core.errors import HandOffFailed, InvalidRequest
from kvferry.core.messages.dynamo import DynamoEndpoint
from kvferry.core.messages.hand_off import Consume, HandOff, Produce, Ticket, parse_hand_off
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import SamplingParams
from support.processes import AUTH_TOKEN
from support.waiting import eventually

EOS = 2
ENDPOINT = DynamoEndpoint(namespace="dynamo", component="backend", role="decode")
BROKEN: list[list[Any]] = [
    [],
    [{"token_ids": [9]}],
    [{"token_ids": ["x"]}],
    [{"token_ids": [9], "log_probs": [-1.0, -2.0]}],
    ["text"],
    [{"token_ids": [100], "finish_reason": "length"}],
    [{"token_ids": [-1], "finish_reason": "length"}],
    [{"token_ids": [], "finish_reason": "error: out of memory"}],
    [WorkerLost("gone")],
]
PARAMS = {"kv_transfer_params": {"remote_engine_id": "p", "remote_blocks_expiry_time": 12.345678901234567}}
Answer = Callable[[dict[str, Any]], list[Any]]


@dataclass
class FakeClient:
    """Answers as `WorkerClient` does. An exception among the outputs is raised."""

    answer: Answer
    endpoint: DynamoEndpoint = ENDPOINT
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_ended: int = 0

    async def call(
        self, worker_id: int, request: dict[str, Any], *, accept_s: float, silence_s: float
    ) -> AsyncGenerator[Any]:
        self.requests.append(request)
        try:
            for output in self.answer(request):
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            self.num_ended += 1


def worker_of(answer: Answer, role: str = "decode", **options: Any) -> tuple[DynamoWorker, FakeClient]:
    card = ModelCard(display_name="m", source_path="/m", worker_type=role, kv_cache_block_size=32, digest="abc")
    model = ModelFiles(SimpleNamespace(), 100, 4096, frozenset({EOS}), {})
    client = FakeClient(answer)
    return DynamoWorker(client, 7, card, model, deadlines=WorkerDeadlines(probe_s=0.01), **options), client  # type: ignore[arg-type]


def asked(hand_off: HandOff = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
    return Request(request_id="r", prompt_token_ids=[5, 6, 7], sampling=params, hand_off=hand_off)


async def outputs(worker: DynamoWorker, request: Request) -> list[EngineOutput]:
    return [one async for one in worker.generate(request)]


def prefilled(request: dict[str, Any]) -> list[Any]:
    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
    return [{"token_ids": [9], "disaggregated_params": PARAMS, "completion_usage": usage}]


def decoded(request: dict[str, Any]) -> list[Any]:
    return [{"token_ids": [9]}, {"token_ids": [8, EOS]}, {"token_ids": [], "finish_reason": "eos"}]


async def ticket_of(token: str = "") -> Ticket:
    worker, _ = worker_of(prefilled, "prefill", token=token)
    [output] = await outputs(worker, asked(Produce("t1")))
    assert output.token_ids == [9]
    assert output.num_cached_tokens == 2
    assert output.kv_transfer_params is not None
    consume = parse_hand_off(msgspec.json.decode(msgspec.json.encode(output.kv_transfer_params)), "")
    assert isinstance(consume, Consume)
    return consume.ticket


async def test_what_a_prefill_worker_answers_reaches_the_decode_worker_unchanged() -> None:
    worker, client = worker_of(decoded, token=AUTH_TOKEN)
    found = await outputs(worker, asked(Consume(await ticket_of(AUTH_TOKEN))))
    assert [one.token_ids for one in found] == [[9], [8, EOS]]  # the token that ends it comes with the reason
    assert [one.finish_reason for one in found] == [None, "stop"]
    assert found[0].num_cached_tokens == 2
    [request] = client.requests
    details = {"cached_tokens": 2}
    assert request["prefill_result"] == {"disaggregated_params": PARAMS, "prompt_tokens_details": details}
    assert request["token_ids"] == [5, 6, 7]
    assert client.num_ended == 1


async def test_tickets_are_sealed_and_of_their_prompt() -> None:
    worker, client = worker_of(decoded, token=AUTH_TOKEN)
    ticket = await ticket_of(AUTH_TOKEN)
    forged = msgspec.structs.replace(ticket, disaggregated_params='{"kv_transfer_params":{"remote_host":"evil"}}')
    bare = Ticket(transfer_id="t1", disaggregated_params="{}")
    for one in (forged, bare, await ticket_of("")):
        with pytest.raises(HandOffFailed):
            await outputs(worker, asked(Consume(one)))
    other = asked(Consume(ticket))
    other.prompt_token_ids = [5, 6, 8]
    with pytest.raises(InvalidRequest, match="other tokens"):
        await outputs(worker, other)
    assert client.requests == []


async def test_a_prompt_without_a_ticket_is_computed_by_the_decode_worker() -> None:
    worker, client = worker_of(decoded)
    await outputs(worker, asked())
    assert client.requests[0]["annotations"] == ["x-bypass-remote-prefill"]
    prefill, _ = worker_of(prefilled, "prefill")
    with pytest.raises(InvalidRequest, match="prompts only"):
        await outputs(prefill, asked())


async def test_an_answer_that_is_continued_is_a_longer_prompt() -> None:
    worker, client = worker_of(decoded)
    request = asked(seed=3, temperature=1.0, max_tokens=9, min_tokens=4)
    request.answer_token_ids = [20, 21]
    await outputs(worker, request)
    sent = client.requests[0]
    assert sent["token_ids"] == [5, 6, 7, 20, 21]
    assert (sent["stop_conditions"]["max_tokens"], sent["stop_conditions"]["min_tokens"]) == (7, 2)
    assert "seed" not in sent["sampling_options"]
    assert worker.continues(SamplingParams(), is_seeded=False)
    assert worker.continues(SamplingParams(temperature=0), is_seeded=True)
    assert not worker.continues(SamplingParams(), is_seeded=True)
    assert not worker.continues(SamplingParams(presence_penalty=1.0), is_seeded=False)


@pytest.mark.parametrize("answer", BROKEN, ids=str)
async def test_an_answer_that_breaks_is_an_error(answer: list[Any]) -> None:
    worker, client = worker_of(lambda _: answer)
    with pytest.raises(WorkerLost):
        await outputs(worker, asked(logprobs=0))
    assert client.num_ended == 1
    if answer != [{"token_ids": [9]}]:  # all that a prefill worker has to say
        prefill, _ = worker_of(lambda _: answer, "prefill")
        with pytest.raises(WorkerLost):
            await outputs(prefill, asked(Produce("t1")))


async def test_a_worker_that_was_lost_is_well_when_it_answers_a_probe() -> None:
    is_gone = True

    def answer(request: dict[str, Any]) -> list[Any]:
        return [WorkerLost("gone")] if is_gone else [{"token_ids": [1], "finish_reason": "length"}]

    worker, client = worker_of(answer)
    with pytest.raises(WorkerLost):
        await outputs(worker, asked())
    assert not worker.healthy
    is_gone = False
    async with asyncio.timeout(10):
        await eventually(lambda: worker.healthy)
    assert client.requests[-1]["_HEALTH_CHECK"] is True
    worker.leave()
    assert not worker.healthy
    await worker.close()


async def test_a_ticket_that_nobody_uses_is_given_up_by_a_decode_worker() -> None:
    worker, client = worker_of(decoded)
    ticket = await ticket_of()
    worker.refused(Consume(ticket))
    worker.refused(Produce("t2"))
    worker.refused(None)
    async with asyncio.timeout(10):
        await eventually(lambda: client.num_ended)
    [request] = client.requests
    assert request["prefill_result"]["disaggregated_params"] == PARAMS
    assert request["stop_conditions"]["max_tokens"] == 1
    await worker.close()


async def test_what_workers_have_no_field_for_is_refused() -> None:
    worker, client = worker_of(decoded)
    for sampling in ({"prompt_logprobs": 1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(InvalidRequest):
            await outputs(worker, asked(**sampling))
    assert client.requests == []


def test_it_describes_itself_as_dynamos() -> None:
    facts = worker_of(decoded)[0].describe()
    assert (facts.stack, facts.role, facts.model_names) == ("dynamo", "decode", ["m"])
    assert worker_of(decoded, "aggregated")[0].describe().role == "both"
