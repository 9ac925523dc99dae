"""What breaks between two vLLMs: the request is recomputed or fails, as the policy says, and no block stays held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import ModelMaker, PromptMaker, VllmMaker, connector
from support.vllm_process import WAIT_S, Answer, VllmProcess, early_ticket
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

NUM_TOKENS = 12
CHUNKS = {"max_num_batched_tokens": 256}


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, make_model: ModelMaker) -> Path:
    """One with one KV cache group, and one with several."""
    return make_model(request.param)


@pytest.fixture(scope="module")
def vllms(start_vllm: VllmMaker) -> dict[str, VllmProcess]:
    """A producer, and a consumer for each policy; they start together."""
    started = {
        "prefill": start_vllm(connector("KvferryP2pConnector", "kv_producer"), **CHUNKS),
        "recompute": start_vllm(connector("KvferryP2pConnector", "kv_consumer", timeout_s=2.0), **CHUNKS),
        "fail": start_vllm(
            connector("KvferryP2pConnector", "kv_consumer", "fail", timeout_s=2.0),
            enable_prefix_caching=False,
            **CHUNKS,
        ),
    }
    return {name: process.ready() for name, process in started.items()}


@pytest.fixture
def prefill(vllms: dict[str, VllmProcess]) -> VllmProcess:
    return vllms["prefill"]


@pytest.fixture(params=["recompute", "fail"])
def decode(vllms: dict[str, VllmProcess], request: pytest.FixtureRequest) -> VllmProcess:
    return vllms[request.param]


@pytest.fixture
def check_answer(
    decode: VllmProcess, prefill: VllmProcess, request: pytest.FixtureRequest
) -> Callable[[Answer, list[int]], None]:
    """That a request whose hand-off was lost is answered as the policy says, and that nothing is left."""
    policy = request.node.callspec.params["decode"]

    def check(answer: Answer, prompt: list[int]) -> None:
        if policy == "fail":
            assert answer.finish_reason == "error"
        else:
            assert answer.token_ids == prefill.run(prompt, NUM_TOKENS).token_ids
        decode.settled()
        prefill.settled()

    return check


CheckAnswer = Callable[[Answer, list[int]], None]


@pytest.fixture
def address(decode: VllmProcess, prefill: VllmProcess, transfer_id: str) -> dict[str, Any]:
    """A ticket as the concurrent hand-off has it: where the producer is, and no more."""
    return early_ticket(prefill, decode, transfer_id)


@pytest.fixture
def transfer_id(request: pytest.FixtureRequest) -> str:
    """Another one for each test."""
    return str(request.node.name)


# Loads that fail.


def test_producer_is_gone(
    decode: VllmProcess,
    prefill: VllmProcess,
    prompt_of: PromptMaker,
    address: dict[str, Any],
    check_answer: CheckAnswer,
) -> None:
    prompt = prompt_of(100)
    ticket = address | {"remote_port": 1}
    check_answer(decode.run(prompt, NUM_TOKENS, ticket), prompt)


def test_lease_is_over(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str, check_answer: CheckAnswer
) -> None:
    prompt = prompt_of(100)
    ticket = prefill.prefill(prompt, transfer_id)
    assert prefill.state().num_used_blocks > 0
    decode.ask("refuse", params=ticket)
    prefill.settled()
    check_answer(decode.run(prompt, NUM_TOKENS, ticket), prompt)


def test_nobody_produces(
    decode: VllmProcess,
    prefill: VllmProcess,
    prompt_of: PromptMaker,
    address: dict[str, Any],
    check_answer: CheckAnswer,
) -> None:
    prompt = prompt_of(100)
    check_answer(decode.run(prompt, NUM_TOKENS, address), prompt)


def test_another_prompt(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str, check_answer: CheckAnswer
) -> None:
    prompt = prompt_of(100)
    ticket = prefill.prefill(prompt_of(150), transfer_id)
    answer = decode.run(prompt, NUM_TOKENS, ticket)
    decode.ask("refuse", params=ticket)
    check_answer(answer, prompt)


def test_producer_has_only_a_prefix(
    vllms: dict[str, VllmProcess], prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str
) -> None:
    """What came is used, as far as it fills blocks; a request that must not be recomputed fails."""
    prompt = prompt_of(300)
    expected = prefill.run(prompt, NUM_TOKENS).token_ids
    for policy, decode in (("recompute", vllms["recompute"]), ("fail", vllms["fail"])):
        ticket = prefill.prefill(prompt[:100], f"{transfer_id}-{policy}") | {"remote_num_tokens": 0}
        answer = decode.run(prompt, NUM_TOKENS, ticket)
        assert answer.token_ids == (expected if policy == "recompute" else [])
        decode.settled()
        prefill.settled()


def test_ticket_makes_no_sense(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str, check_answer: CheckAnswer
) -> None:
    prompt = prompt_of(100)
    ticket = {"do_remote_prefill": True, "remote_port": "many", "transfer_id": transfer_id}
    check_answer(decode.run(prompt, NUM_TOKENS, ticket), prompt)


# Concurrent.


def test_decode_is_asked_first(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, address: dict[str, Any], transfer_id: str
) -> None:
    prompt = prompt_of(1500)
    expected = prefill.run(prompt, NUM_TOKENS).token_ids
    asked = decode.add(prompt, NUM_TOKENS, address)
    prefill.prefill(prompt, transfer_id)
    assert decode.wait(asked).token_ids == expected
    decode.settled()
    prefill.settled()


# Requests that leave.


def test_prefill_leaves_before_it_begins(prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str) -> None:
    prefill.ask("freeze")
    name = prefill.add(prompt_of(500), 1, {"do_remote_decode": True, "transfer_id": transfer_id})
    prefill.ask("abort", name=name)
    prefill.ask("thaw")
    prefill.settled()


def test_prefill_leaves_in_the_middle(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, address: dict[str, Any], transfer_id: str
) -> None:
    prompt = prompt_of(1500)
    prefill.settled()
    prefill.ask("freeze")
    name = prefill.add(prompt, 1, {"do_remote_decode": True, "transfer_id": transfer_id})
    prefill.ask("steps", count=2)
    asked = decode.add(prompt, NUM_TOKENS, address)
    until(lambda: decode.state().figures["num_loading"] > 0, WAIT_S)
    prefill.ask("abort", name=name)
    prefill.ask("thaw")
    assert decode.wait(asked).finish_reason in ("length", "error")
    prefill.settled()
    decode.settled()


def test_decode_leaves_while_it_waits(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str
) -> None:
    prompt = prompt_of(300)
    ticket = prefill.prefill(prompt, transfer_id)
    decode.ask("freeze")
    name = decode.add(prompt, NUM_TOKENS, ticket)
    decode.ask("abort", name=name)
    decode.ask("thaw")
    decode.settled()
    prefill.settled()  # D has told P that it will not come


def test_decode_leaves_while_it_loads(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, address: dict[str, Any], transfer_id: str
) -> None:
    prompt = prompt_of(300)
    name = decode.add(prompt, NUM_TOKENS, address)
    until(lambda: decode.state().figures["num_loading"] > 0, WAIT_S)
    decode.ask("abort", name=name)
    decode.settled()
    ticket = prefill.prefill(prompt, transfer_id + "-after")
    assert decode.run(prompt, NUM_TOKENS, ticket).token_ids == prefill.run(prompt, NUM_TOKENS).token_ids
    prefill.settled()


def test_decode_leaves_while_it_answers(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str
) -> None:
    prompt = prompt_of(300)
    ticket = prefill.prefill(prompt, transfer_id)
    decode.ask("freeze")
    name = decode.add(prompt, 1000, ticket)
    until(lambda: decode.ask("steps", count=1) or decode.state().figures["taken"] > 0, WAIT_S)
    decode.ask("steps", count=5)
    decode.ask("abort", name=name)
    decode.ask("thaw")
    decode.settled()
    prefill.settled()


def test_abort_and_report_meet(
    decode: VllmProcess, prefill: VllmProcess, prompt_of: PromptMaker, transfer_id: str
) -> None:
    """The load ends between two steps, and the request leaves before the scheduler hears of it."""
    for index in range(5):
        prompt = prompt_of(300)
        ticket = prefill.prefill(prompt, f"{transfer_id}-{index}")
        taken = prefill.state().figures["ended_taken"]
        decode.ask("freeze")
        name = decode.add(prompt, NUM_TOKENS, ticket)
        decode.ask("steps", count=1)
        until(lambda taken=taken: prefill.state().figures["ended_taken"] > taken, WAIT_S)
        decode.ask("abort", name=name)
        decode.ask("thaw")
        decode.settled()
        prefill.settled()
