"""What the OpenAI API or vLLM knows and this engine does not do: refused by name, never ignored in silence."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Fields that change the answer, read only to be refused when they ask for something."""

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    thinking_token_budget: Any = None
    tool_choice: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
"""Values that ask for nothing special, beside null, false and what is empty."""

_REASONS = {
    "response_format": "only {'type': 'text'} is supported: this server does not constrain its output",
    "tool_choice": "only 'none' and 'auto' are supported: this server does not force a tool call",
    "function_call": "only 'none' and 'auto' are supported: this server does not force a function call",
    "functions": "use tools instead",
    "modalities": "only ['text'] is supported",
    "use_beam_search": "beam search is not supported",
}


def refuse_unsupported(body: UnsupportedFields) -> None:
    """Raise `InvalidRequest` on the first field that asks for what the engine does not do."""
    for field in UnsupportedFields.__struct_fields__:
        value = getattr(body, field)
        if value and value not in _HARMLESS.get(field, ()):
            reason = _REASONS.get(field, "not supported by this server")
            raise InvalidRequest(f"{field}: {reason}", param=field)
