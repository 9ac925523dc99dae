"""Every field of vLLM's requests is decided on."""

from __future__ import annotations

import pytest

from kvferry.api.requests import ChatCompletionRequest, CompletionRequest
from support.request_schemas import undecided

pytestmark = pytest.mark.vllm


def test_every_field_of_vllm_is_decided_on() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as Chat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as Completion

    assert "structured_outputs" in Chat.model_fields
    assert undecided(Chat.model_fields, ChatCompletionRequest) == set()
    assert undecided(Completion.model_fields, CompletionRequest) == set()
