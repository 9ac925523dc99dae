"""Answers of Anthropic's Messages API, made of chat answers."""

from __future__ import annotations

import json
from typing import Any, Literal, NoReturn

import msgspec

from kvferry.api.dialects.chat import (
    AnswerChoice,
    AnswerUsage,
    CalledTool,
    ChatAnswer,
    ChatTranslation,
    UnreadableAnswer,
    typed_event,
)
from kvferry.core.messages.dialects import AnthropicErrors

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}

_PING = typed_event("ping")

_Block = Literal["thinking", "text", "tool_use"]


class MessagesTranslation(AnthropicErrors, ChatTranslation):
    """Translates one answer. `shows_thoughts` False: blocks of thinking are empty."""

    def __init__(self, request_id: str, *, shows_thoughts: bool = True) -> None:
        super().__init__(request_id)
        self._shows_thoughts = shows_thoughts
        self._begun = False
        self._index, self._block = -1, ""
        """The last content block, and its type while it is open."""
        self._call: int | None = None
        """The number of the open call."""
        self._num_calls = 0
        self._choice: AnswerChoice | None = None
        """The choice with the finish reason."""
        self._usage = AnswerUsage()

    def translate_answer(self, answer: ChatAnswer, choice: AnswerChoice) -> dict[str, Any]:
        assert choice.message is not None
        message, calls = choice.message, choice.message.tool_calls or []
        content: list[dict[str, Any]] = []
        if message.thought:
            thinking = message.thought if self._shows_thoughts else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in calls:
            if (arguments := _arguments(call, choice)) is not None:
                content.append({**_tool_use(call), "input": arguments})
        return (
            self._message(answer, content)
            | _stop(choice, bool(calls))
            | {"usage": _usage(answer.usage or AnswerUsage())}
        )

    def translate_chunk(self, chunk: ChatAnswer) -> bytes:
        written = []
        self._usage = chunk.usage or self._usage
        if not self._begun:
            self._begun = True
            message = self._message(chunk, []) | {"stop_reason": None, "stop_sequence": None}
            written.append(typed_event("message_start", message=message | {"usage": _usage(self._usage)}))
            written.append(_PING)
        for choice in chunk.choices[:1]:
            if (delta := choice.delta) is not None:
                if delta.thought:
                    thinking = delta.thought if self._shows_thoughts else ""
                    written.append(self._open("thinking", {"thinking": "", "signature": ""}))
                    written.append(self._delta("thinking_delta", thinking=thinking) if thinking else b"")
                if delta.content:
                    written.append(self._open("text", {"text": ""}) + self._delta("text_delta", text=delta.content))
                written += [self._call_delta(call) for call in delta.tool_calls or ()]
            if choice.finish_reason is not None:
                self._choice = choice
        return b"".join(written)

    def translate_end(self) -> bytes:
        if self._choice is None:
            raise UnreadableAnswer("the instance ended its answer without a finish reason")
        delta = _stop(self._choice, bool(self._num_calls))
        end = typed_event("message_delta", delta=delta, usage=_usage(self._usage))
        return self._close() + end + typed_event("message_stop")

    def _message(self, answer: ChatAnswer, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._request_id}", "type": "message", "role": "assistant", "model": answer.model}
        return {**head, "content": content}

    # Content blocks of a stream.

    def _open(self, block: _Block, fields: dict[str, Any]) -> bytes:
        """End the open block and begin one, unless it is of the same type, which no call is."""
        if block == self._block != "tool_use":
            return b""
        closed = self._close()
        self._index, self._block = self._index + 1, block
        start = typed_event("content_block_start", index=self._index, content_block={"type": block, **fields})
        return closed + start

    def _close(self) -> bytes:
        if not self._block:
            return b""
        self._block, self._call = "", None
        return typed_event("content_block_stop", index=self._index)

    def _delta(self, kind: str, **values: Any) -> bytes:
        return typed_event("content_block_delta", index=self._index, delta={"type": kind, **values})

    def _call_delta(self, call: CalledTool) -> bytes:
        number, begin = call.index or 0, b""
        if number != self._call:
            if number < self._num_calls:
                raise UnreadableAnswer("the instance's tool calls are interleaved")
            begin = self._open("tool_use", {**_tool_use(call), "input": {}})
            self._call, self._num_calls = number, number + 1
        arguments = call.function.arguments
        return begin + (self._delta("input_json_delta", partial_json=arguments) if arguments else b"")


def _tool_use(call: CalledTool) -> dict[str, Any]:
    """A block of a call without its input. Raises `UnreadableAnswer` unless the call is named."""
    if not (call.id and call.function.name):
        raise UnreadableAnswer("a tool call of the instance has no id or no name")
    return {"type": "tool_use", "id": call.id, "name": call.function.name}


def _arguments(call: CalledTool, choice: AnswerChoice) -> msgspec.Raw | None:
    """The arguments as they are, which are an object; None if the answer's length limit or a stop string cut them off.
    Raises `UnreadableAnswer`."""
    is_cut_off = choice.finish_reason == "length" or choice.was_stopped
    arguments = call.function.arguments
    if not arguments:  # of a function without parameters, or they have not begun
        return None if is_cut_off else msgspec.Raw(b"{}")
    try:
        value = json.loads(arguments, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
        if not isinstance(value, dict):
            raise ValueError("they are of another type")
    except (ValueError, RecursionError) as error:
        if is_cut_off:
            return None
        raise UnreadableAnswer(f"the arguments of a tool call are not a JSON object: {error}") from error
    return msgspec.Raw(arguments.encode())


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _stop(choice: AnswerChoice, has_calls: bool) -> dict[str, Any]:
    """The reason for the end. vLLM says `stop` after a call that the request forced."""
    reason = _STOP_REASONS.get(choice.finish_reason or "")
    if reason is None:
        raise UnreadableAnswer(f"the instance ended its answer with {str(choice.finish_reason)[:40]!r}")
    if reason == "end_turn" and choice.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    if reason == "end_turn" and has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: AnswerUsage) -> dict[str, int]:
    """Numbers of tokens, where the cached ones are apart from the other input."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.num_cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.completion_tokens or 0,
    }
