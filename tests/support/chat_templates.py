"""Chat templates of each kind that models have, as far as they differ in what they do with a message's content; those
that installed packages bring; and conversations to render with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_TURN, _END = "<|{{ message['role'] }}|>", "<|end|>"
_ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EITHER = (
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
)


def _each(content: str) -> str:
    return "{% for message in messages %}" + _TURN + content + _END + "{% endfor %}" + _ANSWER


PRINTING = {
    "prints": _each("{{ message['content'] }}"),
    "trims": _each("{{ message.content | trim }}"),
    "adds": _each("{{ '[' + message['content'] + ']' }}"),
    "splits off thoughts": _each("{{ message['content'].split('</think>')[-1] }}"),
    "writes JSON": _each("{{ message['content'] | tojson }}"),
    "assigns": _each("{% set content = message.content %}{% if content %}{{ content }}{% endif %}"),
}
ITERATING = {
    "iterates": _each("{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"),
    "iterates over texts": _each(
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }};{% endfor %}"
    ),
    "either": _each(_EITHER),
    "assigns and iterates": _each(
        "{% set content = message['content'] %}{% if content is string %}{{ content | trim }}{% else %}"
        "{% for part in content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    ),
    "macro": "{% macro show(it) %}{% if it is string %}{{ it }}{% else %}{% for part in it %}{{ part.text }}"
    "{% endfor %}{% endif %}{% endmacro %}" + _each("{{ show(message.content) }}"),
}


def from_packages() -> dict[str, str]:
    """Templates of installed packages, by a name: of transformers' processors, and of vLLM where that is installed."""
    found = {}
    for module, name in (
        ("transformers.models.smolvlm.processing_smolvlm", "DEFAULT_CHAT_TEMPLATE"),
        ("transformers.models.llama4.processing_llama4", "chat_template"),
    ):
        loaded = importlib.import_module(module)
        if isinstance(template := getattr(loaded, name, None), str):
            found[f"{module.rpartition('.')[2]}.{name}"] = template
    if (vllm := importlib.util.find_spec("vllm")) is not None and vllm.submodule_search_locations:
        folder = Path(vllm.submodule_search_locations[0]) / "transformers_utils" / "chat_templates"
        found |= {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    return found


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


TEXTS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": "hi"}],
    "a conversation": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ],
}
PARTS: dict[str, list[dict[str, Any]]] = {
    "one part": [{"role": "user", "content": _parts("hi")}],
    "two parts": [{"role": "user", "content": _parts("aaa", "bbb")}],
    "parts of all": [
        {"role": "system", "content": _parts("be so", "kind")},
        {"role": "user", "content": _parts("aaa", "bbb")},
        {"role": "assistant", "content": _parts("ccc", "ddd")},
        {"role": "user", "content": _parts("eee")},
    ],
}
NOTHING: dict[str, list[dict[str, Any]]] = {
    "null in a history": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "bye"},
    ],
    "no content": [{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "user", "content": "bye"}],
}
