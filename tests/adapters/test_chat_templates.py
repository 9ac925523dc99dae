"""Prompts of chats are those of vLLM, for every kind of template."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.server.conftest import make_tokenizer
from kvferry.api.requests import ChatCompletionRequest
from kvferry.engine.server.chat_template import render_chat
from kvferry.engine.server.text_codec import TextCodec
from kvferry.models.random_model import make_random_model
from support.chat_templates import ITERATING, NOTHING, PARTS, PRINTING, TEXTS, from_packages

chat_utils = pytest.importorskip("vllm.renderers.chat_utils")
hf = pytest.importorskip("vllm.renderers.hf")

CONVERSATIONS = TEXTS | PARTS | NOTHING
TEMPLATES = PRINTING | ITERATING | from_packages()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("chat")
    make_random_model(folder)
    from vllm.config import ModelConfig

    return ModelConfig(model=str(folder), dtype="float32")


@pytest.mark.parametrize("name", TEMPLATES)
async def test_prompts_are_vllms(model: Any, name: str) -> None:
    tokenizer, template = make_tokenizer(), TEMPLATES[name]
    tokenizer.chat_template = template
    from vllm.exceptions import VLLMValidationError

    kind = hf.resolve_chat_template_content_format(template, None, "auto", tokenizer, model_config=model)
    for messages in CONVERSATIONS.values():
        conversation, _, _ = chat_utils.parse_chat_messages(deepcopy(messages), model, content_format=kind)
        try:
            expected = hf.safe_apply_chat_template(
                model, tokenizer, conversation, tokenize=False, add_generation_prompt=True
            )
        except VLLMValidationError:
            continue
        if all(text in expected for text in texts_of(messages)):  # Llama 4's shows the first part of a system's only
            body: Any = msgspec.convert({"messages": messages}, ChatCompletionRequest)
            assert await render_chat(body, TextCodec(tokenizer)) == expected, messages


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    parts = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    return [part["text"] for content in parts for part in content]
