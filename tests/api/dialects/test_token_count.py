"""The number of a prompt's tokens in another API's form."""

from __future__ import annotations

import json

import pytest

from kvferry.api.dialects.chat import UnreadableAnswer
from kvferry.api.dialects.token_count import TokenCountTranslation
from kvferry.core.messages.dialects import AnthropicErrors


def translation() -> TokenCountTranslation:
    return TokenCountTranslation("req-1", AnthropicErrors(), lambda count: {"input_tokens": count})


def test_the_instances_count_is_translated() -> None:
    assert json.loads(translation().answer(200, b'{"count":7,"tokens":[1]}')) == {"input_tokens": 7}


@pytest.mark.parametrize("content", [b"", b"{", b'{"count":"7"}', b"[]", b'{"x":1}', b"\xff"])
def test_what_is_no_count_is_an_error_of_the_instances(content: bytes) -> None:
    with pytest.raises(UnreadableAnswer, match="number of tokens cannot be read"):
        translation().answer(200, content)


def test_an_error_is_translated_with_the_request_id() -> None:
    body = json.loads(translation().answer(400, b'{"error":{"message":"too long","type":"invalid_request_error"}}'))
    assert body["error"] == {"type": "invalid_request_error", "message": "too long"}
    assert body["request_id"] == "req-1"


def test_a_stream_is_refused_at_its_end() -> None:
    one = translation()
    assert one.events(b"data: {}\n\n") == b""
    assert one.end().startswith(b"event: error\n")
    assert b"stream of events" in one.end()
