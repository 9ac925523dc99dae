"""Bodies become requests, or sentences about what is wrong with them."""

from __future__ import annotations

import pytest

from kvferry.api.decoding import decode_body
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, refuse_unsupported
from kvferry.core.errors import InvalidRequest


def test_unknown_fields_are_ignored_and_integers_are_numbers() -> None:
    body = decode_body(b'{"prompt": "a", "temperature": 1, "what_is_this": {"x": [1]}}', CompletionRequest)
    assert (body.prompt, body.temperature) == ("a", 1.0)


@pytest.mark.parametrize("prompt", [b'"a"', b'["a","b"]', b"[1,2]", b"[[1],[2,3]]"])
def test_the_four_kinds_of_prompt(prompt: bytes) -> None:
    decode_body(b'{"prompt": ' + prompt + b"}", CompletionRequest)


@pytest.mark.parametrize(
    ("raw", "param", "sentence"),
    [
        (b'{"prompt":"a","n":"x"}', "n", "n must be an integer, got a string"),
        (b'{"prompt":"a","n":true}', "n", "n must be an integer, got a boolean"),
        (b'{"prompt":"a","echo":"yes"}', "echo", "echo must be true or false, got a string"),
        (b'{"prompt":{}}', "prompt", "prompt must be a string or an array, got an object"),
        (b'{"prompt":[[1,"x"]]}', "prompt[0][1]", "prompt[0][1] must be an integer, got a string"),
        (b'{"prompt":"a","logit_bias":{"x":1}}', "logit_bias", "a key of logit_bias must be an integer"),
        (b'{"prompt":"a","logit_bias":{"1":"x"}}', "logit_bias", "logit_bias must be a number, got a string"),
        (b'{"prompt":"a","truncation_side":"up"}', "truncation_side", "truncation_side cannot be 'up'"),
        (b'{"prompt":"a","n":18446744073709551617}', "n", "n must be at most 9223372036854775807"),
        (b'{"prompt":"a","temperature":1e999}', "temperature", "temperature is not acceptable: Number out of range"),
        (b'{"prompt":"a","stream_options":{"include_usage":3}}', "stream_options.include_usage", "must be true or"),
        (b"{}", "prompt", "prompt is required"),
        (b"[]", None, "the body must be an object, got an array"),
        (b"", None, "The body is not valid JSON"),
        (b'{"prompt": "a"', None, "The body is not valid JSON"),
        (b'{"prompt":"\xff"}', None, "The body is not valid JSON"),
        (b'{"unknown":' + b"[" * 100_000, None, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said_in_words(raw: bytes, param: str | None, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(raw, CompletionRequest)
    assert caught.value.param == param
    assert sentence in caught.value.message
    assert "$" not in caught.value.message


def test_places_in_lists_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\] must be an object, got a string"):
        decode_body(b'{"messages":[{}, "x"]}', ChatCompletionRequest)
    with pytest.raises(InvalidRequest, match=r"tokens\[1\] must be an integer, got null"):
        decode_body(b'{"tokens":[1, null]}', DetokenizeRequest)


@pytest.mark.parametrize(
    "fields",
    [
        b'"response_format": {"type": "text"}',
        b'"tool_choice": "auto"',
        b'"tool_choice": "none"',
        b'"modalities": ["text"]',
        b'"bad_words": [], "suffix": "", "use_beam_search": false, "guided_json": null',
    ],
)
def test_what_asks_for_nothing_is_not_refused(fields: bytes) -> None:
    refuse_unsupported(decode_body(b'{"prompt": "a", ' + fields + b"}", CompletionRequest))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", b'{"type": "json_schema", "json_schema": {}}'),
        ("tool_choice", b'{"type": "function", "function": {"name": "f"}}'),
        ("tool_choice", b'"required"'),
        ("structured_outputs", b'{"regex": "a"}'),
        ("guided_regex", b'"a*"'),
        ("modalities", b'["text", "audio"]'),
        ("use_beam_search", b"true"),
        ("bad_words", b'["a"]'),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(field: str, value: bytes) -> None:
    body = decode_body(b'{"prompt": "a", "' + field.encode() + b'": ' + value + b"}", CompletionRequest)
    with pytest.raises(InvalidRequest, match=field) as caught:
        refuse_unsupported(body)
    assert caught.value.param == field
