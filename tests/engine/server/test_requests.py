"""What reaches the engine for what a client asks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvferry.api.fields import WARNING_HEADER
from kvferry.core.messages.hand_off import Consume, PrefillResult, Produce, Ticket
from kvferry.core.messages.kv_keys import MAX_KEY_BYTES, MAX_KEYS, KVTransferParams
from kvferry.core.messages.openai import TIMELINE_HEADER
from kvferry.core.messages.timeline import Timeline
from kvferry.core.request import EngineOutput, Request
from kvferry.core.sampling import child_seed
from kvferry.engine.server.routes import endpoint

from .fake_engine import DeterministicEngine
from .running import running


class Asker:
    """Sends requests to a server of its own and keeps what the engine saw."""

    def __init__(self, engine: DeterministicEngine, client: aiohttp.ClientSession) -> None:
        self.engine, self.client = engine, client

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
        async with self.client.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any = "the quick fox", **fields: Any) -> list[Request]:
        """The engine's requests for one completion."""
        self.engine.requests.clear()
        status, answer = await self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, **fields})
        assert status == 200, answer
        return list(self.engine.requests)

    async def refused(self, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
        """The error of a request that is answered with 400 and does not reach the engine."""
        self.engine.requests.clear()
        status, answer = await self.post(path, {"prompt": "a", **fields})
        assert status == 400, answer
        assert not self.engine.requests
        return dict(answer["error"])


@pytest.fixture
async def asker(tokenizer: Any) -> AsyncIterator[Asker]:
    engine = DeterministicEngine(tokenizer, max_model_len=64)
    async with running(engine) as server, aiohttp.ClientSession(server.url) as client:
        yield Asker(engine, client)


# Sampling.


async def test_the_models_defaults_hold_where_the_client_is_silent(asker: Asker) -> None:
    asker.engine.default_sampling = {"temperature": 0.6, "top_k": 40, "min_p": None, "do_sample": True}
    (request,) = await asker.complete(top_k=3)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.6, 3, 1.0)
    (request,) = await asker.complete(temperature=0.0)
    assert request.sampling.temperature == 0.0


async def test_every_field_arrives(asker: Asker) -> None:
    (request,) = await asker.complete(
        n=1, stop=["x", "y"], stop_token_ids=[9], logit_bias={"11": -5}, min_tokens=2, ignore_eos=True, top_p=0.5,
        min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, logprobs=2, prompt_logprobs=3,
        seed=-7, priority=-2, cache_salt="tenant", include_stop_str_in_output=True,
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("x", "y"), (9,), {11: -5.0})
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (2, 4, True)
    assert (sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.5, 0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.4)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.seed) == (2, 3, -7)
    assert sampling.include_stop_str_in_output
    assert (request.priority, request.cache_salt, request.deadline) == (-2, "tenant", None)


async def test_seeds_are_always_set(asker: Asker) -> None:
    seeds = {request.sampling.seed for request in await asker.complete([[7, 8], [7, 8]], n=3)}
    assert len(seeds) == 6
    assert None not in seeds
    requests = await asker.complete([[7, 8], [7, 8]], n=3, seed=5)
    assert [request.sampling.seed for request in requests] == [child_seed(5, index) for index in range(3)] * 2
    assert [request.request_id.rsplit("-", 1)[1] for request in requests] == list("012345")


async def test_the_deadline_is_on_the_monotonic_clock(asker: Asker) -> None:
    (request,) = await asker.complete(timeout=30)
    assert request.deadline is not None
    assert 0 < request.deadline - time.monotonic() <= 30


async def test_echo_asks_for_the_prompts_logprobs(asker: Asker) -> None:
    (request,) = await asker.complete(echo=True, logprobs=2, prompt_logprobs=1)
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 2)
    (request,) = await asker.complete(echo=True, max_tokens=0)
    assert request.sampling.max_tokens == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_logprobs_of_tokens_by_their_ids(asker: Asker, path: str) -> None:
    chat = path.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    asked = {"logprobs": True} if chat else {"logprobs": 0}
    status, answer = await asker.post(path, {**prompt, **asked, "max_tokens": 1, "logprob_token_ids": [9, 3, 9]})
    assert status == 200, answer
    assert asker.engine.requests[-1].sampling.logprob_token_ids == (9, 3)
    for fields in ({**asked, "logprob_token_ids": [10**6]}, {"logprob_token_ids": [1]}):
        error = await asker.refused(path, **prompt, **fields)
        assert error["param"] == "logprob_token_ids"
    error = await asker.refused(path, **prompt, **asked, logprob_token_ids=[1] * 129)
    assert error["param"] == "logprob_token_ids"


async def test_the_prompts_text(asker: Asker) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 3}
    path, asked = "/v1/chat/completions", {**body, "return_prompt_text": True}
    assert "prompt_text" not in (await asker.post(path, body))[1]
    text = (await asker.post(path, asked))[1]["prompt_text"]
    assert "the quick fox" in text
    async with asker.client.post(path, json={**asked, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")]
    assert [event["prompt_text"] for event in events if "prompt_text" in event] == [text]
    truncated = (await asker.post(path, {**asked, "truncate_prompt_tokens": 2}))[1]["prompt_text"]
    assert 0 < len(truncated) < len(text)
    assert text.endswith(truncated)
    assert (await asker.refused(return_prompt_text=True))["param"] == "return_prompt_text"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_interval_of_a_stream(asker: Asker, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    prompt.pop("prompt" if "chat" in path else "messages")
    body = {**prompt, "max_tokens": 12, "stream": True, "return_token_ids": True, "ignore_eos": True, "n": 2, "seed": 3}

    async def tokens_of_events(**fields: Any) -> tuple[list[int], list[int]]:
        async with asker.client.post(path, json={**body, **fields}) as response:
            text = await response.text()
        events = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
        chunks = [event["token_ids"] for event in events if event["index"] == 1 and event.get("token_ids")]
        return [len(chunk) for chunk in chunks], [token for chunk in chunks for token in chunk]

    _, tokens = await tokens_of_events()
    assert await tokens_of_events(stream_interval=5) == ([1, 5, 5, 1], tokens)
    assert await tokens_of_events(stream_interval=2**31) == ([1, 11], tokens)
    assert (await asker.refused(path, **prompt, stream_interval=0))["param"] == "stream_interval"


# Prompts and lengths.


async def test_special_tokens_are_added_to_texts_only(asker: Asker) -> None:
    begin = asker.engine.tokenizer.bos_token_id
    assert (await asker.complete("fox"))[0].prompt_token_ids[0] == begin
    assert (await asker.complete("fox", add_special_tokens=False))[0].prompt_token_ids[0] != begin
    assert (await asker.complete([7, 8]))[0].prompt_token_ids == [7, 8]


async def test_truncation(asker: Asker) -> None:
    prompt = list(range(50, 90))
    for fields, kept in (
        ({"truncate_prompt_tokens": 5}, prompt[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, prompt[:5]),
        ({"truncate_prompt_tokens": 500}, prompt),
        ({"truncate_prompt_tokens": -1, "max_tokens": 50}, prompt[-14:]),
    ):
        assert (await asker.complete(prompt, **fields))[0].prompt_token_ids == kept
    assert (await asker.refused(truncate_prompt_tokens=0))["param"] == "truncate_prompt_tokens"


async def test_the_context_is_the_limit(asker: Asker) -> None:
    assert len(await asker.complete([7] * 60, max_tokens=4)) == 1
    error = await asker.refused(prompt=[7] * 60, max_tokens=5)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in error["message"]
    assert "65 tokens (60 in the prompt, 5 in the completion)" in error["message"]
    assert "resulted in 64 tokens" in (await asker.refused(prompt=[7] * 64))["message"]


async def test_a_text_that_cannot_fit_is_not_encoded(asker: Asker) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "a" * 10_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 10_000}]}),
    ):
        error = await asker.refused(path, **fields)
        assert error["code"] == "context_length_exceeded"
        assert "characters" in error["message"]
    assert len((await asker.complete("a" * 10_000, truncate_prompt_tokens=5))[0].prompt_token_ids) == 5


async def test_chat_takes_what_the_prompt_leaves(asker: Asker) -> None:
    messages = [{"role": "user", "content": "a"}]
    await asker.post("/v1/chat/completions", {"messages": messages})
    (request,) = asker.engine.requests
    assert request.sampling.max_tokens == 64 - len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "add_special_tokens": False, "n": 129}, "n"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"9": 101}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": True}, "prompt": ["a", "b"]}, "kv_transfer_params"),
    ],
)
async def test_refusals_name_the_field(asker: Asker, fields: Any, param: str) -> None:
    assert (await asker.refused(**fields))["param"] == param


# Hand-offs.

PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t1"}


async def test_who_waits_for_a_prefill_that_is_refused_is_told(asker: Asker) -> None:
    for wrong in ({"max_tokens": 0}, {"prompt": [1] * 5000}, {"model": "another"}):
        body = {"prompt": "a", "kv_transfer_params": PRODUCE, **wrong}
        status, _ = await asker.post("/v1/completions", body)
        assert status in (400, 404)
    assert [one.transfer_id for one in asker.engine.refusals] == ["t1"] * 3
    await asker.refused(max_tokens=0, kv_transfer_params={"transfer_id": "t1"})
    await asker.refused(max_tokens=0, kv_transfer_params={**PRODUCE, "transfer_id": 7})
    assert [one.transfer_id for one in asker.engine.refusals] == ["t1"] * 3


async def test_a_prefill_makes_one_token_and_a_ticket(asker: Asker) -> None:
    fields = {"prompt": "the fox", "max_tokens": 30, "min_tokens": 3, "n": 4, "kv_transfer_params": PRODUCE}
    status, answer = await asker.post("/v1/completions", fields)
    assert status == 200
    (request,) = asker.engine.requests
    assert request.hand_off == Produce("t1")
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (1, 1)
    assert answer["kv_transfer_params"]["transfer_id"] == "t1"
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    assert len(answer["choices"]) == 1


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_prefill_has_the_ticket_in_its_last_chunk(asker: Asker, include_usage: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "kv_transfer_params": PRODUCE}
    body["stream_options"] = {"include_usage": include_usage}
    async with asker.client.post("/v1/chat/completions", json=body) as response:
        *_, last, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["kv_transfer_params"]["transfer_id"] == "t1"


async def test_a_transfer_without_an_id_gets_the_engines(asker: Asker) -> None:
    _, answer = await asker.post("/v1/completions", {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}})
    (request,) = asker.engine.requests
    assert isinstance(request.hand_off, Produce)
    assert answer["kv_transfer_params"]["transfer_id"] == request.hand_off.transfer_id != ""


async def test_the_first_choice_fetches_and_the_others_wait_for_it(tokenizer: Any) -> None:
    engine = DeterministicEngine(tokenizer)
    first_may, seen = asyncio.Event(), []
    generate = engine.outputs

    async def outputs(request: Request) -> AsyncIterator[EngineOutput]:
        seen.append(request.request_id[-1])
        if request.hand_off is not None:
            assert seen == ["0"]
            await first_may.wait()
        async for output in generate(request):
            yield output

    engine.outputs = outputs  # type: ignore[method-assign]
    ticket = Ticket(transfer_id="t2", prefill_result=PrefillResult(first_token=7, seed=1)).to_params()
    async with running(engine) as server, aiohttp.ClientSession(server.url) as client:
        body = {"prompt": "the fox", "n": 3, "max_tokens": 6, "kv_transfer_params": ticket}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with client.get("/health"):
            first_may.set()
        async with await asking as response:
            answer = await response.json()
    assert [isinstance(request.hand_off, Consume) for request in engine.requests] == [True, False, False]
    assert [request.sampling.max_tokens for request in engine.requests] == [6, 6, 6]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


# The timeline.


async def test_the_routers_stamps_are_kept(asker: Asker) -> None:
    now = time.time()
    header = {TIMELINE_HEADER: json.dumps({"arrived": now - 2, "routed": now - 1, "done": 5})}
    _, answer = await asker.post("/v1/completions", {"prompt": "a", "return_timeline": True}, headers=header)
    timeline = answer["timeline"]
    assert (timeline["arrived"], timeline["routed"]) == (now - 2, now - 1)
    assert timeline["done"] > now


@pytest.mark.parametrize(
    "header", ["nonsense", '{"arrived": 1e12}', '{"arrived": -5}', '{"arrived": "x"}', "[]", '{"a": ' * 5000]
)
async def test_stamps_that_make_no_sense_are_left_aside(asker: Asker, header: str) -> None:
    before = time.time()
    body = {"prompt": "a", "return_timeline": True}
    _, answer = await asker.post("/v1/completions", body, headers={TIMELINE_HEADER: header})
    assert before <= answer["timeline"]["arrived"] <= time.time()


async def test_each_choice_has_a_timeline_of_its_own(asker: Asker) -> None:
    first, second = await asker.complete(n=2)
    assert first.timeline is not second.timeline
    assert isinstance(first.timeline, Timeline)


# The other routes.


async def test_tokenize_and_back(asker: Asker) -> None:
    _, tokens = await asker.post("/tokenize", {"prompt": "the 🎉", "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 64
    _, text = await asker.post("/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "<|begin|>the 🎉"}
    _, bare = await asker.post("/tokenize", {"prompt": "the 🎉", "add_special_tokens": False})
    assert bare["tokens"] == tokens["tokens"][1:]
    assert bare["token_strs"] is None
    status, error = await asker.post("/detokenize", {"tokens": [99999]})
    assert (status, error["error"]["param"]) == (400, "tokens")


async def test_tokenize_messages(asker: Asker) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    _, tokens = await asker.post("/tokenize", {"messages": messages, "model": "its-other-name"})
    await asker.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert asker.engine.requests[-1].prompt_token_ids == tokens["tokens"]
    assert (await asker.post("/tokenize", {}))[0] == 400
    assert (await asker.post("/tokenize", {"prompt": "a", "model": "none"}))[0] == 404


async def test_models_under_all_their_names(asker: Asker) -> None:
    async with asker.client.get("/v1/models") as response:
        cards = (await response.json())["data"]
    assert [card["id"] for card in cards] == ["test-model", "its-other-name"]
    assert {card["max_model_len"] for card in cards} == {64}
    _, answer = await asker.post("/v1/completions", {"prompt": "a", "model": "its-other-name"})
    assert answer["model"] == "its-other-name"


async def test_health_version_and_metrics(asker: Asker) -> None:
    async with asker.client.get("/version") as response:
        assert "version" in await response.json()
    async with asker.client.get("/metrics") as response:
        text = await response.text()
    assert 'vllm:num_requests_running{engine="0",model_name="test-model"} 0.0' in text
    assert "kvferry:connector_bytes_sent" in text
    asker.engine.healthy = False
    async with asker.client.get("/health") as response:
        assert response.status == 503


async def test_release_and_check(asker: Asker) -> None:
    asker.engine.leases.add("t9")
    assert await asker.post("/kvferry/release", {"transfer_id": "t9"}) == (200, {"released": True})
    assert await asker.post("/kvferry/release", {"transfer_id": "t9"}) == (200, {"released": False})
    assert (await asker.post("/kvferry/release", {}))[0] == 400
    async with asker.client.get("/kvferry/check") as response:
        assert await response.json() == {"ok": True}
    asker.engine.leak = "3 KV blocks are in use"
    async with asker.client.get("/kvferry/check") as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "3 KV blocks are in use"


# Fields nobody knows, on every route.

ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/kvferry/release": {"transfer_id": "t"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_unknown_fields_are_told_of_in_a_header(asker: Asker, path: str) -> None:
    for fields, warning in (
        ({}, None),
        ({"what_is_this": {"x": [1]}, "store": True}, "fields without effect: what_is_this, store"),
        ({"stream": True, "é\r\n": 1}, "fields without effect: \\xe9??"),
    ):
        if fields.get("stream") and not path.startswith("/v1"):
            continue
        async with asker.client.post(path, json={**ROUTES[path], **fields}) as response:
            assert (response.status, response.headers.get(WARNING_HEADER)) == (200, warning)


async def test_tools_that_are_never_called_are_told_of(asker: Asker, caplog: pytest.LogCaptureFixture) -> None:
    endpoint._log_once.cache_clear()
    body = {**ROUTES["/v1/chat/completions"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    for fields, warning in (
        ({}, "tools: no parser of this model's tool calls is known"),
        ({"tool_choice": "auto", "store": True}, "fields without effect: store; tools: no parser"),
        ({"tool_choice": "none"}, ""),
        ({"tools": []}, ""),
    ):
        async with asker.client.post("/v1/chat/completions", json={**body, **fields}) as response:
            assert response.status == 200
            told = response.headers.get(WARNING_HEADER, "")
            assert told.startswith(warning)
            assert bool(told) == bool(warning)
    assert [record.message for record in caplog.records if "has tools" in record.message] == [
        "a request has tools: no parser of this model's tool calls is known; calls that it writes stay text in content."
        " --tool-call-parser names one"
    ]


@pytest.mark.parametrize("path", ROUTES)
async def test_near_misses_are_refused_on_every_route(asker: Asker, path: str) -> None:
    known, typo = next((name, name + "s" if name[-1] != "s" else name[:-1]) for name in ROUTES[path])
    status, answer = await asker.post(path, {**ROUTES[path], typo: 5})
    assert (status, answer["error"]["param"]) == (400, typo)
    assert answer["error"]["message"] == f"unknown field {typo!r}; did you mean {known!r}?"


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_no_json_is_refused_on_every_route(asker: Asker, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    for data, content in (
        (b"{}", {"Content-Type": "text/plain"}),
        (b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}", headers),
        (b'{"x":1,"x":2}', headers),
        (json.dumps(ROUTES[path]).encode("utf-16"), headers),
        (b"", headers),
    ):
        async with asker.client.post(path, data=data, headers=content) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_errors_do_not_repeat_all_that_was_sent(asker: Asker) -> None:
    error = await asker.refused(stop=5, **{"x" * 100_000: 1})
    assert len(json.dumps(error)) < 1000
    messages = [{"role": "x" * 100_000, "content": "a"}]
    assert len(json.dumps(await asker.refused("/v1/chat/completions", messages=messages))) < 3000


async def test_more_tokens_than_the_context_are_not_turned_into_text(asker: Asker) -> None:
    status, answer = await asker.post("/detokenize", {"tokens": [7] * 65})
    assert (status, answer["error"]["param"]) == (400, "tokens")
    status, answer = await asker.post("/tokenize", {"prompt": "a" * 10_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "fields", [{"kvcache_load_keys": [5]}, {"kvcache_store_keys": [[""]]}, {"prefix_prompt_ids": ["a"]}]
)
async def test_items_of_lists_have_their_types_on_every_path(asker: Asker, path: str, fields: dict[str, Any]) -> None:
    status, answer = await asker.post(path, {"messages": [{"role": "user", "content": "hello"}], **fields})
    assert status == 400
    assert answer["error"]["param"].startswith((*fields,))


# Keys of KV.


@pytest.mark.parametrize("at_top", [True, False], ids=["at the top", "in kv_transfer_params"])
async def test_keys_reach_the_first_choice_of_their_prompt(asker: Asker, at_top: bool) -> None:
    fields = {"kvcache_store_keys": [["a", None], None], "kvcache_load_keys": [None, ["b"]], "kvcache_ttl_s": 60}
    sent: dict[str, Any] = fields if at_top else {"kv_transfer_params": fields}
    arrived = await asker.complete([[7, 8], [9, 10]], n=2, cache_salt="tenant", **sent)
    requests = sorted(arrived, key=lambda request: request.request_id)  # the others wait for the first ones
    assert [one.transfer_params for one in requests] == [
        KVTransferParams(kvcache_store_keys=("a", None), kvcache_ttl_s=60.0, tenant="tenant"),
        None,
        KVTransferParams(kvcache_load_keys=("b",), kvcache_ttl_s=60.0, tenant="tenant"),
        None,
    ]
    assert [one.hand_off for one in requests] == [None] * 4


async def test_keys_of_a_chat(asker: Asker) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "kvcache_load_keys": ["k"]}
    status, answer = await asker.post("/v1/chat/completions", body)
    assert status == 200, answer
    (request,) = asker.engine.requests
    assert request.transfer_params == KVTransferParams(kvcache_load_keys=("k",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kvcache_store_keys", "k"),
        ("kvcache_store_keys", [7]),
        ("kvcache_store_keys", ["k" * (MAX_KEY_BYTES + 1)]),
        ("kvcache_store_keys", ["k"] * (MAX_KEYS + 1)),
        ("kvcache_load_keys", {"k": 1}),
        ("kvcache_load_keys", [["a"], ["b"]]),
        ("prefix_prompt_ids", ["a"]),
        ("prefix_prompt_ids", [9, 9]),
        ("kvcache_ttl_s", -1),
        ("kvcache_wait_s", "soon"),
    ],
)
async def test_wrong_keys_are_refused_by_name(asker: Asker, field: str, value: Any) -> None:
    for sent in ({field: value}, {"kv_transfer_params": {field: value}}):
        error = await asker.refused(prompt=[7, 8], **sent)
        assert error["param"].partition("[")[0] == field
        assert field in error["message"]
