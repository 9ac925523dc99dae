"""Requests with the fields of vLLM's chats and completions, by name, and those that a router does not hand off."""

from __future__ import annotations

from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXT = 'def merge(a, b):\n    """Merge two lists of things that were sorted before."""\n    out = []\n' * 6
EOS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "color": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}


def function(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    """A tool."""
    properties = {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["a", "b"]}}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **more}}


def schema_format(**more: Any) -> dict[str, Any]:
    """A response format, for answers that are long enough for it."""
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 120,
        **more,
    }


def _long(number: int) -> list[int]:
    return [30 + index % 200 for index in range(number)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


CALLED = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"x","unit":"a"}'}}
FORCED_CALL = r'<tool_call>\{"name": "get_weather", "arguments": \{"city": "[a-z]{3}", "unit": "a"\}\}</tool_call>'
NAMED = {"type": "function", "function": {"name": "other"}}

CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1, "seed": 5},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "max_tokens 1": {"max_tokens": 1},
    "max_completion_tokens 1": {"max_completion_tokens": 1, "logprobs": True, "top_logprobs": 2},
    "both limits": {"max_completion_tokens": 5, "max_tokens": 9},
    "end at once": {"logit_bias": {str(EOS): 100}},
    "end at once, logprobs": {"logit_bias": {str(EOS): 100}, "logprobs": True, "top_logprobs": 2},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "json_schema": schema_format(),
    "json_schema, seeded": schema_format(temperature=1, seed=3),
    "json_schema, logprobs": schema_format(logprobs=True, top_logprobs=2),
    "regex": {"structured_outputs": {"regex": "[a-c]{3,9}x"}},
    "regex of one token": {"structured_outputs": {"regex": "a"}},
    "choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "x" [0-9]+ "y"'}},
    "regex, min_tokens": {"structured_outputs": {"regex": "ab"}, "min_tokens": 8},
    "regex, stop": {"structured_outputs": {"regex": "abcdef"}, "stop": ["c"]},
    "regex, ignore_eos": {"structured_outputs": {"regex": "ab"}, "ignore_eos": True},
    "regex, penalties": {
        "structured_outputs": {"regex": "[a-z]{12}"},
        "repetition_penalty": 1.5,
        "frequency_penalty": 1,
    },
    "regex, logit_bias": {"structured_outputs": {"regex": "[a-z]{6}"}, "logit_bias": {"70": 100}},
    "empty constraint": {"structured_outputs": {}},
    "two constraints": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "structural_tag": {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
            "triggers": ["<f>"],
        }
    },
    "tool required": {"tools": [function()], "tool_choice": "required", "max_tokens": 120},
    "tool required of two": {"tools": [function(), function("other")], "tool_choice": "required", "max_tokens": 120},
    "tool required, seeded": {
        **{"tools": [function(), function("other")], "tool_choice": "required", "max_tokens": 120},
        **{"temperature": 1, "seed": 11},
    },
    "tool named": {"tools": [function(), function("other")], "tool_choice": NAMED, "max_tokens": 120},
    "tool named, max_tokens 1": {"tools": [function(), function("other")], "tool_choice": NAMED, "max_tokens": 1},
    "tool required, not parallel": {
        **{"tools": [function()], "tool_choice": "required", "max_tokens": 120},
        "parallel_tool_calls": False,
    },
    "tool required, logprobs": {
        **{"tools": [function()], "tool_choice": "required", "max_tokens": 120},
        **{"logprobs": True, "top_logprobs": 1},
    },
    "tool auto": {"tools": [function()], "tool_choice": "auto"},
    "tool none": {"tools": [function()], "tool_choice": "none"},
    "tool strict": {"tools": [function(strict=True)], "tool_choice": "auto", "max_tokens": 60},
    "tool auto, forced text": {
        "tools": [function()],
        "tool_choice": "auto",
        "structured_outputs": {"regex": FORCED_CALL},
        "max_tokens": 120,
    },
    "tool unknown": {"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
    "tool required of none": {"tool_choice": "required"},
    "tool history": {
        "messages": [
            _user(TEXT),
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ],
        "tools": [function()],
    },
    "continued": {
        "messages": [_user(TEXT), {"role": "assistant", "content": "def"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "return_token_ids": {"return_token_ids": True},
    "return_prompt_text": {"return_prompt_text": True},
    "session_id": {"session_id": "s"},
    "reasoning_effort": {"reasoning_effort": "low"},
    "include_reasoning": {"include_reasoning": False},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "enable_thinking, json_schema": schema_format(chat_template_kwargs={"enable_thinking": False}),
    "thought, then json_schema": schema_format(thinking_token_budget=5, max_tokens=140),
    "top_logprobs alone": {"top_logprobs": 2},
    "no messages": {"messages": []},
    "too long": {"messages": [_user(TEXT * 30)]},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 5},
    "logprobs 0": {"logprobs": 0},
    "token ids": {"prompt": _long(150)},
    "suffix": {"suffix": "x"},
    "min_tokens is max_tokens": {"min_tokens": 6, "max_tokens": 6},
    "min_tokens above max_tokens": {"min_tokens": 9, "max_tokens": 6},
    "end at once": {"logit_bias": {str(EOS): 100}},
    "end at once, min_tokens": {"logit_bias": {str(EOS): 100}, "min_tokens": 3},
    "end at once, ignore_eos": {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "max_tokens": 6},
    "special tokens": {
        "skip_special_tokens": False,
        "logit_bias": {str(EOS): 100},
        "max_tokens": 3,
        "ignore_eos": True,
    },
    "choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
    "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 120},
    "json_schema": schema_format(),
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.3},
    "top_k, min_p": {"temperature": 1, "top_k": 20, "min_p": 0.05, "top_p": 0.9, "seed": 8},
    "allowed_token_ids": {"allowed_token_ids": [100, 101, 102]},
    "bad_words": {"bad_words": ["out"]},
    "logprob_token_ids": {"logprob_token_ids": [100, 101], "logprobs": 1},
    "logit_bias": {"logit_bias": {"300": 100}},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
        "logit_bias": {"300": 100},
    },
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "truncate 64": {"truncate_prompt_tokens": 64},
    "truncate to fit": {"prompt": _long(4090), "truncate_prompt_tokens": -1, "max_tokens": 24},
    "too long": {"prompt": _long(4090), "max_tokens": 24},
    "just fits": {"prompt": _long(4072), "max_tokens": 24},
    "cache_salt": {"cache_salt": "s"},
    "priority": {"priority": 2},
    "request_id": {"request_id": "abc"},
    "vllm_xargs": {"vllm_xargs": {"a": 1}},
    "unknown field": {"foo": 1},
    "stream_interval": {"stream_interval": 4},
    "wrong model": {"model": "nope"},
    "empty prompt": {"prompt": ""},
    "logprobs 99": {"logprobs": 99},
    "temperature -1": {"temperature": -1},
}
WHOLE_ON_D: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, several": (CHAT, {"n": 2, "temperature": 1, "seed": 9}),
    "chat, echo": (CHAT, {"echo": True}),
    "chat, prompt_logprobs": (CHAT, {"prompt_logprobs": 1}),
    "several": (COMPLETION, {"n": 3, "temperature": 1, "seed": 4}),
    "echo": (COMPLETION, {"echo": True}),
    "echo, logprobs": (COMPLETION, {"echo": True, "logprobs": 2}),
    "prompt_logprobs": (COMPLETION, {"prompt_logprobs": 2}),
    "batch": (COMPLETION, {"prompt": [TEXT, TEXT[:200]]}),
    "beam search": (COMPLETION, {"use_beam_search": True, "n": 2}),
    "negative max_tokens": (COMPLETION, {"max_tokens": -1}),
    "max_tokens of another type": (COMPLETION, {"max_tokens": "5"}),
}
"""Requests that need the whole prompt or several answers where the answer is."""


def body_of(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The request."""
    prompt: dict[str, Any] = {"messages": [_user(TEXT)]} if path == CHAT else {"prompt": TEXT}
    return {"model": "m", "max_tokens": 10, "temperature": 0, **prompt, **changes}
