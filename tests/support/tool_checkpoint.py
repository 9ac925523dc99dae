"""A tiny random checkpoint whose chat template has tools, calls and reasoning, in the hermes format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import kvferry.models

TEMPLATE = (
    "{% if tools %}<|user|>Tools, called as <tool_call>: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


def make_tool_checkpoint(folder: Path, model_maker: Callable[..., Path]) -> Path:
    """The folder of the checkpoint. `<think>` and `</think>` are tokens, `<tool_call>` is text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(kvferry.models.__file__).with_name("tiny_python"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    assert json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    return model_maker("llama", tokenizer=folder / "tokenizer", vocab_size=len(tokenizer) + 16)
