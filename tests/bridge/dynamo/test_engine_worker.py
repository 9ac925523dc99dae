"""Requests of Dynamo's frontend for kvferry's engine, and its answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.bridge.dynamo.engine_worker import TICKET, engine_request, worker_output
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import Consume, Produce, Ticket, TokenLogprobs
from kvferry.core.request import EngineOutput, Request

FRONT: Any = SimpleNamespace(vocab_size=100, max_model_len=32, default_sampling={"top_p": 0.5, "temperature": 0.7})


def asked(*, prefills: bool = False, **changes: Any) -> Request:
    return engine_request(
        {"model": "m", "token_ids": [5, 6, 7], "annotations": [], **changes}, FRONT, is_prefill=prefills
    )


def test_what_the_client_says_wins_over_the_models_defaults() -> None:
    request = asked(
        sampling_options={"temperature": 0.0, "top_k": None, "seed": 4, "unknown": 1},
        stop_conditions={"max_tokens": 9, "min_tokens": 2, "stop": ["x"], "stop_token_ids_hidden": [8]},
        output_options={"logprobs": 3},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.logprobs) == (0.0, 0.5, 4, 3)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (9, 2, (8,))
    assert asked().sampling.max_tokens == 29, "what the context leaves"
    assert asked().sampling.seed is not None
    assert asked(stop_conditions={"max_tokens": 1000}).sampling.max_tokens == 29


def test_hand_offs() -> None:
    produced = asked(prefills=True, stop_conditions={"max_tokens": 9, "min_tokens": 5})
    assert isinstance(produced.hand_off, Produce)
    assert produced.sampling.max_tokens == 1
    ticket = Ticket(transfer_id=produced.hand_off.transfer_id, remote_host="127.0.0.1", remote_port=3)
    answer = worker_output(EngineOutput(request_id="r", token_ids=[9], kv_transfer_params=ticket.to_params()))
    consumed = asked(prefill_result={"disaggregated_params": answer["disaggregated_params"]}).hand_off
    assert isinstance(consumed, Consume)
    assert consumed.ticket == ticket
    for nothing in (None, {}, {"disaggregated_params": None}, {"disaggregated_params": {TICKET: {}}}):
        assert asked(prefill_result=nothing).hand_off is None


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": []},
        {"token_ids": [100]},
        {"token_ids": [-1]},
        {"token_ids": "text"},
        {"token_ids": [5] * 32},
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"temperature": -1.0}},
        {"stop_conditions": {"max_tokens": 2, "min_tokens": 3}},
        {"prefill_result": {"disaggregated_params": {TICKET: {"do_remote_prefill": True, "remote_port": "x"}}}},
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        asked(**changes)


def test_answers_have_finish_reasons_and_logprobs_as_dynamo_reads_them() -> None:
    logprobs = [TokenLogprobs(9, -0.5, 1, {9: -0.5, 8: -1.0})]
    answer = worker_output(EngineOutput(request_id="r", token_ids=[9], logprobs=logprobs, finish_reason="stop"))
    assert answer["finish_reason"] == "stop"
    assert answer["log_probs"] == [-0.5]
    assert [one["token_id"] for one in answer["top_logprobs"][0]] == [9, 8]
    assert worker_output(EngineOutput(request_id="r", token_ids=[9])) == {"token_ids": [9]}
