"""What Dynamo's workers answer, validated before it is used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.bridge.dynamo.messages import read_output, worker_request
from kvferry.core.errors import InvalidRequest
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("reason", "finished"),
    [(None, None), ("eos", "stop"), ("stop", "stop"), ("length", "length"), ("cancelled", "abort"), ("odd", "error")],
)
def test_reasons_are_kvferrys(reason: str | None, finished: str | None) -> None:
    assert read_output({"finish_reason": reason}, 10).finished == finished


@pytest.mark.parametrize(
    "data",
    [
        {"token_ids": [10]},
        {"token_ids": [-1]},
        {"token_ids": "x"},
        {"token_ids": [1], "log_probs": [0.0, 0.0]},
        {"token_ids": [1, 2], "top_logprobs": [[]]},
        [],
        None,
    ],
)
def test_what_cannot_be_is_refused(data: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        read_output(data, 10)


def test_cached_tokens_are_told_or_not() -> None:
    assert read_output({}, 10).num_cached_tokens is None
    usage = {"prompt_tokens_details": {"cached_tokens": -3}}
    assert read_output({"completion_usage": usage}, 10).num_cached_tokens == 0


def test_log_probabilities_of_the_drawn_token_are_apart_from_the_likely_ones() -> None:
    top = [{"token_id": 3, "logprob": -2.0, "rank": 5}, {"token_id": 1, "logprob": -0.1, "rank": 1}]
    [entry] = read_output({"token_ids": [3], "log_probs": [-2.0], "top_logprobs": [top]}, 10).logprobs()
    assert entry.token_id == 3
    assert 3 not in dict(entry.top)
    assert read_output({"token_ids": [3]}, 10).logprobs() == []


def request(**sampling: Any) -> Request:
    return Request(
        request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(**({"max_tokens": 5} | sampling))
    )


def test_a_request_is_tokens_in_and_tokens_out() -> None:
    body = worker_request(request(temperature=0.5, seed=2**63 + 1, top_k=0), "m", {7, 2})
    assert body["token_ids"] == [1, 2, 3]
    assert body["stop_conditions"]["max_tokens"] == 5
    assert body["sampling_options"]["seed"] == 1
    assert body["sampling_options"]["top_k"] == -1
    assert body["eos_token_ids"] == [2, 7]
    assert worker_request(request(ignore_eos=True), "m", {7})["eos_token_ids"] == []


@pytest.mark.parametrize("field", ["prompt_logprobs", "logit_bias"])
def test_what_workers_have_no_field_for_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        worker_request(request(**{field: 1 if field == "prompt_logprobs" else {1: 2.0}}), "m", ())
    assert caught.value.param == field
