"""The forms of content that a chat template accepts, found by rendering small conversations with it.

Some templates print a message's content, others iterate over its parts, many do either, and some for certain roles
only. vLLM concludes the same from the template's syntax tree. Rendering also covers macros, filters and
string operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Content = str | list[dict[str, Any]]
Message = dict[str, Any]

_FIRST, _SECOND = "kvferryone", "kvferrytwo"
_PART_SEPARATOR = "\n"
"""Separator of the text parts of one message for a template without parts, as in vLLM."""


@dataclass(frozen=True)
class ContentForms:
    """The forms that one template accepts. `parts`: roles whose content may be an array of parts; `only_parts`: roles
    whose content must be one. `developer`: True if it has this role."""

    parts: frozenset[str]
    only_parts: frozenset[str]
    developer: bool

    def content(self, role: str, texts: list[str] | str | None) -> Content:
        """A message's content, which was null, a string or parts, in a form that the template accepts. Null becomes an
        empty text, and a tool's result is always one string, as in vLLM."""
        if role in self.only_parts or (isinstance(texts, list) and role in self.parts):
            return [_part(text) for text in ([texts] if isinstance(texts, str) else texts or [])]
        return _PART_SEPARATOR.join(texts) if isinstance(texts, list) else texts or ""


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def content_forms(tokenizer: Any, tools: Any) -> ContentForms:
    """The forms of the template that this tokenizer uses with these tools. Raises the tokenizer's error if it has
    none for them."""
    return _forms_of(tokenizer, tokenizer.get_chat_template(None, tools=tools))


@lru_cache(maxsize=16)
def _forms_of(tokenizer: Any, template: str) -> ContentForms:
    def render(messages: list[Message]) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except Exception:  # noqa: BLE001 - templates are programs: any error means that this is not accepted
            return ""

    users = _contents(render, lambda content: [{"role": "user", "content": content}])
    user = {"role": "user", "content": [_part("a")] if users == (False, True) else "a"}
    accepted = {
        "user": users,
        "system": _contents(render, lambda content: [{"role": "system", "content": content}, user]),
        "assistant": _contents(render, lambda content: [user, {"role": "assistant", "content": content}, user]),
    }
    return ContentForms(
        parts=frozenset(role for role, (_, parts) in accepted.items() if parts),
        only_parts=frozenset(role for role, (text, parts) in accepted.items() if parts and not text),
        developer='"developer"' in template or "'developer'" in template,
    )


def _contents(
    render: Callable[[list[Message]], str], in_conversation: Callable[[Content], list[Message]]
) -> tuple[bool, bool]:
    """Two flags: a string is rendered; an array of two parts is, one after the other and not as a literal."""
    text = render(in_conversation([_part(_FIRST), _part(_SECOND)]))
    begin, end = text.find(_FIRST), text.find(_SECOND)
    shown = text[max(0, begin - 32) : end]
    return _FIRST in render(
        in_conversation(_FIRST)
    ), 0 <= begin < end and "'text'" not in shown and '"text"' not in shown
