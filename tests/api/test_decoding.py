"""Bodies become requests, or sentences about what is wrong with them."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.api.decoding import decode_body, decode_value, require_json
from kvferry.api.other_fields import REFUSED, refuse_unsupported
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest
from kvferry.core.errors import InvalidRequest


def test_integers_are_numbers_and_unknown_fields_are_named() -> None:
    decoded = decode_body(b'{"prompt": "a", "temperature": 1, "what_is_this": {"x": [1]}}', CompletionRequest)
    assert (decoded.body.prompt, decoded.body.temperature) == ("a", 1.0)
    assert decoded.ignored == ("what_is_this",)


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
        (b"", None, "the body is not valid JSON"),
        (b'{"prompt": "a"', None, "the body is not valid JSON"),
        (b'{"prompt":"\xff"}', None, "byte 11 is not UTF-8"),
        (b'{"prompt":"a","x":"\xff"}', None, "byte 19 is not UTF-8"),
        (b'{"prompt":"\\ud800"}', "prompt", "prompt has the character \\ud800, half of a surrogate pair"),
        (b'{"prompt":"\\ud800 b"}', "prompt", "half of a surrogate pair"),
        (b'{"prompt":"a","cache_salt":"x\\uDFFF"}', "cache_salt", "cache_salt has the character \\udfff, half of"),
        (b'{"prompt":"\\ud83d\\ude00","cache_salt":"\\udc00\\ud800"}', "cache_salt", "the character \\udc00"),
        (b'{"prompt":["a","\\ud800"]}', "prompt[1]", "prompt[1] has the character \\ud800"),
        (b'{"prompt":"a","vllm_xargs":{"a":{"b":["\\ud801"]}}}', "vllm_xargs.a.b[0]", "the character \\ud801"),
        (b'{"prompt":"a","vllm_xargs":{"\\ud801":1}}', "a name in vllm_xargs", "the character \\ud801"),
        (b'{"prompt":"a","\\ud801":1}', "the name of a field", "the character \\ud801"),
        (b'{"prompt":"\\ud8"}', None, "the body is not valid JSON"),
        (b'\xef\xbb\xbf{"prompt":"a"}', None, "without a byte order mark"),
        ('{"prompt":"a"}'.encode("utf-16"), None, "must be JSON in UTF-8"),
        ('{"prompt":"a"}'.encode("utf-32-le"), None, "must be JSON in UTF-8"),
        (b'{"prompt":"a","prompt":"b"}', "prompt", "prompt appears twice"),
        (b'{"prompt":"a","x":1,"\\u0078":2}', "x", "x appears twice"),
        (b'{"prompt":"a","logit_bias":{"5":1,"5":2}}', None, "'5' is listed twice in one object"),
        (b'{"prompt":"a","x":[{"y":{"z":1,"z" :1}}]}', None, "'z' is listed twice in one object"),
        (b'{"prompt":"a","stop":"' + b"a" * 300 + b'"}', "stop", "must have at most 256 characters"),
        (b'{"prompt":"a","stop":[' + b'"a",' * 40 + b'"a"]}', "stop", "stop must have at most 32 items"),
        (b'{"prompt":"a","stop":[' + b'"a",' * 50_000 + b'"a"]}', "stop", "at most 131072 are accepted"),
        (b'{"prompt":"a","n":' + b"9" * 10_000 + b"}", "n", "n is not acceptable: Integer value out of range"),
        (b'{"prompt":"a","temperature":NaN}', None, "not valid JSON"),
        (b'{"prompt":"a","timeout":1e300}', "timeout", "timeout must be at most 604800"),
        (b'{"prompt":[' + b"1," * 1_000_001 + b"1]}", None, "more than 1000000 values"),
        (b"{" + b",".join(b'"x%d":1' % number for number in range(257)) + b"}", None, "has 257 fields; at most 256"),
        (b'{"prompt":[' + b'"",' * 200_000 + b'""]}', None, "more than 100000 strings, arrays and objects"),
        (b'{"prompt":[' + b'"\\\\",' * 400_000 + b'""]}', None, "more than 100000 strings, arrays and objects"),
        (b'{"unknown":' + b"[" * 50_000, None, "nested too deeply"),
        *[
            (b'{"prompt":"a","' + field + b'":' + opening * depth + b"1" + closing * depth + b"}", None, "nested too")
            for field in (b"unknown", b"tool_choice", b"kv_transfer_params")
            for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"))
            for depth in (64, 900, 1000, 20_000)
        ],
    ],
)
def test_what_is_wrong_is_said_in_words(raw: bytes, param: str | None, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(raw, CompletionRequest)
    assert caught.value.param == param
    assert sentence in caught.value.message
    assert "$" not in caught.value.message
    assert len(caught.value.message) < 300


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
    refuse_unsupported(decode_body(b'{"prompt": "a", ' + fields + b"}", CompletionRequest).unsupported)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", b'{"type": "function", "function": {"name": "f"}}'),
        ("tool_choice", b'"required"'),
        ("guided_regex", b'"a*"'),
        ("modalities", b'["text", "audio"]'),
        ("use_beam_search", b"true"),
        *((field, b"{}") for field, refusal in REFUSED.items() if {} not in refusal.harmless and field != "best_of"),
        ("guided_choice", b"[]"),
        ("thinking_token_budget", b"0"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(field: str, value: bytes) -> None:
    body = decode_body(b'{"prompt": "a", "' + field.encode() + b'": ' + value + b"}", CompletionRequest)
    with pytest.raises(InvalidRequest, match=field) as caught:
        refuse_unsupported(body.unsupported)
    assert caught.value.param == field


def test_as_many_levels_as_are_allowed() -> None:
    deepest = b'{"tool_choice":' + b"[" * 63 + b"]" * 63 + b',"prompt":"' + b"[{" * 100 + b'"}'
    assert decode_body(deepest, CompletionRequest).body.prompt == "[{" * 100


def test_commas_and_quotes_within_texts_are_text() -> None:
    text = '"a", [1, 2], {"b": 3}\n' * 10_000
    assert decode_body(msgspec.json.encode({"prompt": text}), CompletionRequest).body.prompt == text


@pytest.mark.parametrize("field", ["stop", "logit_bias", "tools", "kv_transfer_params"])
def test_fields_that_are_no_prompt_are_bounded(field: str) -> None:
    raw = b'{"messages":[],"' + field.encode() + b'":"' + b"a" * 9_000_000 + b'"}'
    with pytest.raises(InvalidRequest, match=f"{field} has 9000002 bytes; at most") as caught:
        decode_body(raw, ChatCompletionRequest)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "raw", [b'{"a":' + b"[" * 990 + b"]" * 990 + b"}", b"[" * 100_000, b'{"a":', b'"\xff"', b'"\\ud800"']
)
def test_json_within_json_is_bounded_too(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_value(raw)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=UTF-8",
        "application/vnd.api+json",
        'application/json;charset="utf-8"',
    ],
)
def test_json_by_any_name(content_type: str) -> None:
    require_json(content_type, None)
    require_json(content_type, "identity")


@pytest.mark.parametrize(
    ("content_type", "encoding", "sentence"),
    [
        (None, None, "must be application/json, got none"),
        ("text/plain", None, "got 'text/plain'"),
        ("application/x-www-form-urlencoded", None, "must be application/json"),
        ("multipart/form-data; boundary=x", None, "must be application/json"),
        ("application/json; charset=utf-16", None, "must be UTF-8, not 'utf-16'"),
        ("application/json", "gzip", "must not be compressed"),
        ("x" * 5000, None, "x…"),
    ],
)
def test_what_is_said_to_be_something_else(content_type: str | None, encoding: str | None, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        require_json(content_type, encoding)
    assert sentence in caught.value.message
    assert len(caught.value.message) < 200
