"""Every field of SGLang's requests is decided on."""

from __future__ import annotations

import pytest

from kvferry.api.requests import ChatCompletionRequest, CompletionRequest
from support.request_schemas import declared_fields, undecided
from support.sglang_python import PYTHON

pytestmark = pytest.mark.sglang


def test_every_field_of_sglang_is_decided_on() -> None:
    protocol = "lib/python*/site-packages/sglang/srt/entrypoints/openai/protocol.py"
    (source,) = PYTHON.parents[1].glob(protocol)
    chat, completion = (declared_fields(source, name) for name in ("ChatCompletionRequest", "CompletionRequest"))
    assert "ebnf" in chat
    assert undecided(chat, ChatCompletionRequest) == set()
    assert undecided(completion, CompletionRequest) == set()
