"""What every OpenAI endpoint of kvferry's must do, whatever model is behind it: an engine, or a router before many.

Each check takes an unmodified `openai.OpenAI` client and a model name. They assume nothing about what the model
says; what must be equal is asked for with temperature 0 or a seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # its import takes most of a second, in each process that collects tests
    from openai import AsyncOpenAI, OpenAI

PROMPT = "The quick brown fox"
OTHER_PROMPT = "What is the capital of France?"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 5}
NEVER_ENDING = {"extra_body": {"ignore_eos": True}}


def complete(client: OpenAI, model: str, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, **{**GREEDY, "max_tokens": 12, **options})


def chat(client: OpenAI, model: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model=model, messages=options.pop("messages", MESSAGES), **{**GREEDY, "max_tokens": 12, **options}
    )


def texts_of(stream: Any) -> dict[int, str]:
    """The texts of a stream by choice."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts


# The shapes of answers.


def models_are_listed(client: OpenAI, model: str) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert model in cards
    assert cards[model].model_extra["max_model_len"] > 0
    assert client.models.retrieve(model).id == model


def a_completion_has_its_parts(client: OpenAI, model: str) -> None:
    answer = complete(client, model, **NEVER_ENDING)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", model)
    assert [(choice.index, choice.finish_reason) for choice in answer.choices] == [(0, "length")]
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert 0 <= answer.usage.prompt_tokens_details.cached_tokens <= answer.usage.prompt_tokens


def a_chat_completion_has_its_parts(client: OpenAI, model: str) -> None:
    answer = chat(client, model, **NEVER_ENDING)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", model)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage.completion_tokens == 12


def the_request_id_comes_back(client: OpenAI, model: str) -> None:
    header = {"X-Request-Id": "order-66"}
    raw = client.completions.with_raw_response.create(model=model, prompt=PROMPT, max_tokens=1, extra_headers=header)
    assert raw.headers["x-request-id"] == "order-66"
    assert raw.parse().id == "cmpl-order-66"


def max_completion_tokens_wins(client: OpenAI, model: str) -> None:
    answer = chat(client, model, max_tokens=9, max_completion_tokens=4, **NEVER_ENDING)
    assert answer.usage.completion_tokens == 4


# Streams.


def a_stream_says_what_the_whole_says(client: OpenAI, model: str) -> None:
    whole = complete(client, model).choices[0].text
    assert texts_of(complete(client, model, stream=True)) == {0: whole}


def a_chat_stream_says_what_the_whole_says(client: OpenAI, model: str) -> None:
    whole = chat(client, model).choices[0].message.content
    chunks = list(chat(client, model, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert texts_of(chunks) == {0: whole}
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] in ("stop", "length")
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert len({chunk.id for chunk in chunks}) == 1


def usage_comes_last_in_a_stream(client: OpenAI, model: str) -> None:
    options = {"include_usage": True}
    whole = complete(client, model, n=2, **NEVER_ENDING).usage
    *chunks, last = complete(client, model, n=2, stream=True, stream_options=options, **NEVER_ENDING)
    assert last.choices == []
    counted = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)
    assert counted == (whole.prompt_tokens, 24, whole.prompt_tokens + 24)
    assert all(chunk.usage is None for chunk in chunks)


def continuous_usage_counts_up(client: OpenAI, model: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = chat(client, model, stream=True, stream_options=options, **NEVER_ENDING)
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def a_stream_without_usage_has_none(client: OpenAI, model: str) -> None:
    assert all(chunk.usage is None for chunk in complete(client, model, stream=True))


def leaving_a_stream_early_is_fine(client: OpenAI, model: str) -> None:
    with complete(client, model, max_tokens=500, stream=True, **NEVER_ENDING) as stream:
        next(iter(stream))
    assert complete(client, model, max_tokens=2).usage.completion_tokens <= 2


# Several choices, prompts and clients.


def n_choices_are_told_apart(client: OpenAI, model: str) -> None:
    sampled = {"temperature": 1.0, "seed": 7}
    alone = complete(client, model, **sampled).choices[0].text
    three = complete(client, model, n=3, **sampled).choices
    assert [choice.index for choice in three] == [0, 1, 2]
    assert three[0].text == alone
    assert len({choice.text for choice in three}) > 1
    assert texts_of(complete(client, model, n=3, stream=True, **sampled)) == {
        choice.index: choice.text for choice in three
    }


def a_seed_repeats_and_its_absence_does_not(client: OpenAI, model: str) -> None:
    seeded = [complete(client, model, temperature=1.0, seed=3).choices[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]
    without = complete(client, model, [PROMPT] * 4, temperature=1.0, seed=None).choices
    assert len({choice.text for choice in without}) > 1


def a_batch_answers_each_prompt(client: OpenAI, model: str) -> None:
    alone = [complete(client, model, prompt).choices[0].text for prompt in (PROMPT, OTHER_PROMPT)]
    batch = complete(client, model, [PROMPT, OTHER_PROMPT], n=2)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices] == [alone[0], alone[0], alone[1], alone[1]]


def token_ids_are_as_good_as_text(client: OpenAI, model: str) -> None:
    by_text = complete(client, model, extra_body={"return_token_ids": True}).choices[0]
    ids = by_text.model_extra["prompt_token_ids"]
    by_ids = complete(client, model, ids, extra_body={"return_token_ids": True}).choices[0]
    assert by_ids.text == by_text.text
    assert by_ids.model_extra["token_ids"] == by_text.model_extra["token_ids"]
    assert complete(client, model, [ids, ids]).choices[1].text == by_text.text


def many_at_once_get_what_one_gets(client: OpenAI, model: str) -> None:
    from openai import AsyncOpenAI

    prompts = [f"{PROMPT} number {number}" for number in range(16)]
    alone = [complete(client, model, prompt).choices[0].text for prompt in prompts]

    async def ask(patient: AsyncOpenAI, prompt: str) -> str:
        stream = await patient.completions.create(model=model, prompt=prompt, max_tokens=12, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as patient:
            return await asyncio.gather(*(ask(patient, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == alone


# What ends an answer.


def a_stop_string_ends_the_answer_before_it(client: OpenAI, model: str) -> None:
    text = complete(client, model, max_tokens=24, **NEVER_ENDING).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    before = text[: text.index(stop)]
    stopped = complete(client, model, max_tokens=24, stop=[stop, "never in there"], **NEVER_ENDING)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (before, "stop")
    assert stopped.choices[0].model_extra["stop_reason"] == stop
    assert stopped.usage.completion_tokens < 24
    streamed = complete(client, model, max_tokens=24, stop=stop, stream=True, **NEVER_ENDING)
    assert texts_of(streamed) == {0: before}
    body = {"ignore_eos": True, "include_stop_str_in_output": True}
    assert complete(client, model, max_tokens=24, stop=stop, extra_body=body).choices[0].text == before + stop


def a_stop_token_ends_the_answer_before_it(client: OpenAI, model: str) -> None:
    body = {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
    ids = complete(client, model, extra_body=body).choices[0].model_extra["token_ids"]
    stopped = complete(client, model, extra_body={**body, "stop_token_ids": [ids[5]]}).choices[0]
    kept = ids[: ids.index(ids[5]) + 1]
    assert stopped.model_extra["token_ids"] == kept
    assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", ids[5])
    assert stopped.text == complete(client, model, max_tokens=max(len(kept) - 1, 1), extra_body=body).choices[0].text


# Log-probabilities.


def completion_logprobs_fit_the_text(client: OpenAI, model: str) -> None:
    body = {"ignore_eos": True, "skip_special_tokens": False}
    choice = complete(client, model, logprobs=3, extra_body=body).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0
        assert top[token] == logprob
        assert len(top) <= 4
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        # Bytes that never become a character are only known for what they are with the token after them.
        assert token.startswith("bytes:") or "�" in token or choice.text[offset:].lstrip("�").startswith(token)


def streamed_logprobs_are_those_of_the_whole(client: OpenAI, model: str) -> None:
    whole = complete(client, model, logprobs=2).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in complete(client, model, logprobs=2, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [entry for chunk in chunks if chunk for entry in getattr(chunk, name)] == getattr(whole, name)


def chat_logprobs_spell_the_answer(client: OpenAI, model: str) -> None:
    body = {"ignore_eos": True, "skip_special_tokens": False}
    choice = chat(client, model, logprobs=True, top_logprobs=4, extra_body=body).choices[0]
    places = choice.logprobs.content
    assert len(places) == 12
    spelled = b"".join([bytes(place.bytes) for place in places]).decode(errors="replace")
    assert spelled == choice.message.content or "�" in choice.message.content
    for place in places:
        assert len(place.top_logprobs) == 4
        assert place.top_logprobs == sorted(place.top_logprobs, key=lambda top: -top.logprob)
    assert chat(client, model, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def echo_begins_with_the_prompt(client: OpenAI, model: str) -> None:
    plain = complete(client, model).choices[0].text
    answer = complete(client, model, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == PROMPT + plain
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert texts_of(complete(client, model, echo=True, stream=True)) == {0: PROMPT + plain}
    alone = complete(client, model, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert alone.text == PROMPT
    assert len(alone.logprobs.tokens) == answer.usage.prompt_tokens


def prompt_logprobs_have_an_entry_a_token(client: OpenAI, model: str) -> None:
    answer = complete(client, model, extra_body={"prompt_logprobs": 2})
    entries = answer.choices[0].model_extra["prompt_logprobs"]
    assert len(entries) == answer.usage.prompt_tokens
    assert entries[0] is None
    assert all({"logprob", "rank", "decoded_token"} <= value.keys() for value in entries[1].values())


# What is kvferry's own.


def the_timeline_comes_when_asked_for(client: OpenAI, model: str) -> None:
    body = {"return_timeline": True}
    timeline = complete(client, model, extra_body=body).model_extra["timeline"]
    assert timeline["arrived"] <= timeline["done"]
    *_, last = complete(client, model, stream=True, extra_body=body)
    assert "done" in last.model_extra["timeline"]
    assert "timeline" not in (complete(client, model).model_extra or {})


# Types, and fields that nobody knows.


def answers_are_of_openais_types(client: OpenAI, model: str) -> None:
    """Strictly: the client itself takes anything."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole = client.chat.completions.with_raw_response
    for options in ({}, {"logprobs": True, "top_logprobs": 3, "n": 2}):
        raw = whole.create(model=model, messages=MESSAGES, max_tokens=4, **options)  # type: ignore[call-overload]
        ChatCompletion.model_validate_json(raw.text, strict=True)
        for chunk in chat(client, model, max_tokens=4, stream=True, stream_options={"include_usage": True}, **options):
            ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        raw = client.completions.with_raw_response.create(
            model=model, prompt=PROMPT, max_tokens=4, n=options.get("n", 1), logprobs=options.get("top_logprobs", 0)
        )
        Completion.model_validate_json(raw.text, strict=True)


def what_openai_has_and_changes_nothing_is_passed_over(client: OpenAI, model: str) -> None:
    known: dict[str, Any] = {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=2, tools=tools, tool_choice="auto",
        response_format={"type": "text"}, modalities=["text"], user="u", extra_body={"what_is_this": 1}, **known
    )  # fmt: skip
    warning = raw.headers["x-kvferry-warning"]
    assert all(name in warning for name in (*known, "what_is_this"))


def a_typo_is_refused(client: OpenAI, model: str) -> None:
    import openai

    for ask in (complete, chat):
        with pytest.raises(openai.BadRequestError, match="did you mean 'max_tokens'") as caught:
            ask(client, model, extra_body={"max_token": 5})
        assert caught.value.param == "max_token"


# Refusals.


def wrong_values_are_bad_requests(client: OpenAI, model: str) -> None:
    import openai

    for field, options in {
        "temperature": {"temperature": -1},
        "n": {"n": 0},
        "top_p": {"top_p": 1.5},
        "logprobs": {"logprobs": 99},
        "stop": {"stop": [""]},
        "max_tokens": {"extra_body": {"max_tokens": "many"}},
        "suffix": {"suffix": "end"},
        "best_of": {"best_of": 4},
        "guided_json": {"extra_body": {"guided_json": {"type": "object"}}},
        "timeout": {"extra_body": {"timeout": -1}},
        "stream_options": {"stream_options": {"include_usage": True}},
        "prompt": {"prompt": [2**40]},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, model, **options)
        assert caught.value.param == field
        assert caught.value.type == "invalid_request_error"
        assert field in caught.value.body["message"]


def wrong_chat_values_are_bad_requests(client: OpenAI, model: str) -> None:
    import openai

    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for field, options in {
        "messages": {"messages": []},
        "messages[0].role": {"messages": [{"content": "no role"}]},
        "messages[0].content[0]": {"messages": [{"role": "user", "content": [image]}]},
        "tool_choice": {"tool_choice": "required"},
        "tool_choice.function": {
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "tools[0].function.name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "structured_outputs": {"extra_body": {"structured_outputs": {"regex": "(a"}}},
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
        },
        "top_logprobs": {"logprobs": True, "top_logprobs": 50},
        "max_completion_tokens": {"max_completion_tokens": 0},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, model, **options)
        assert caught.value.param == field


def too_long_a_context_has_its_code(client: OpenAI, model: str) -> None:
    import openai

    longest = client.models.retrieve(model).model_extra["max_model_len"]
    for ask in (
        lambda: complete(client, model, max_tokens=longest),
        lambda: complete(client, model, [[0] * longest]),
        lambda: chat(client, model, max_tokens=longest),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
        assert f"maximum context length is {longest} tokens" in caught.value.body["message"]


def an_unknown_model_is_not_found(client: OpenAI, model: str) -> None:
    import openai

    for ask in (lambda: complete(client, "no-such"), lambda: chat(client, "no-such")):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"


CHECKS: list[Callable[[OpenAI, str], None]] = [
    models_are_listed,
    a_completion_has_its_parts,
    a_chat_completion_has_its_parts,
    the_request_id_comes_back,
    max_completion_tokens_wins,
    a_stream_says_what_the_whole_says,
    a_chat_stream_says_what_the_whole_says,
    usage_comes_last_in_a_stream,
    continuous_usage_counts_up,
    a_stream_without_usage_has_none,
    leaving_a_stream_early_is_fine,
    n_choices_are_told_apart,
    a_seed_repeats_and_its_absence_does_not,
    a_batch_answers_each_prompt,
    token_ids_are_as_good_as_text,
    many_at_once_get_what_one_gets,
    a_stop_string_ends_the_answer_before_it,
    a_stop_token_ends_the_answer_before_it,
    completion_logprobs_fit_the_text,
    streamed_logprobs_are_those_of_the_whole,
    chat_logprobs_spell_the_answer,
    echo_begins_with_the_prompt,
    prompt_logprobs_have_an_entry_a_token,
    the_timeline_comes_when_asked_for,
    answers_are_of_openais_types,
    what_openai_has_and_changes_nothing_is_passed_over,
    a_typo_is_refused,
    wrong_values_are_bad_requests,
    wrong_chat_values_are_bad_requests,
    too_long_a_context_has_its_code,
    an_unknown_model_is_not_found,
]
"""For `pytest.mark.parametrize`; another suite runs the same list against its own base URL."""
