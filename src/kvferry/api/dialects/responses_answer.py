"""Answers of OpenAI's Responses API, made of chat answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.api.dialects.chat import (
    AnswerChoice,
    AnswerUsage,
    CalledTool,
    ChatAnswer,
    ChatTranslation,
    InstanceError,
    UnreadableAnswer,
    typed_event,
)
from kvferry.api.dialects.responses import ResponsesRequest, function_tools
from kvferry.api.dialects.translated import without_none
from kvferry.core.entropy import secret_hex
from kvferry.core.errors import RequestError
from kvferry.core.messages.dialects import ResponsesErrors
from kvferry.core.messages.openai import error_code

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FINISHED = ("stop", "tool_calls", *_INCOMPLETE)

Item = dict[str, Any]


class ResponsesTranslation(ResponsesErrors, ChatTranslation):
    """Translates one answer. `store`: called with the whole response before the client has its end."""

    def __init__(
        self,
        request_id: str,
        response_id: str,
        request: ResponsesRequest,
        created: float,
        store: Callable[[Item], None] | None,
    ) -> None:
        super().__init__(request_id)
        self._response = _head(response_id, request, created)
        self._store, self._has_logprobs = store, request.has_logprobs
        self._number = 0
        """The number of the next event."""
        self._items: list[Item] = []
        """The items so far, of which the last one may be open."""
        self._is_open = False
        self._chunks: list[str] = []
        """The text of the open item, or its arguments."""
        self._num_calls = 0
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is still to come."""
        self._finish_reason: str | None = None
        self._usage: AnswerUsage | None = None

    def body(self, error: RequestError, request_id: str) -> bytes:
        return super().body(_renamed(error), request_id)

    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        return self.error_event(_renamed(error), self._number)

    def translate_answer(self, answer: ChatAnswer, choice: AnswerChoice) -> Item:
        choice.delta = choice.message
        self.translate_chunk(answer)
        self.translate_end()
        return self._response

    def translate_chunk(self, chunk: ChatAnswer) -> bytes:
        written = []
        self._usage = chunk.usage or self._usage
        if not self._number:
            self._response["model"] = chunk.model
            written += [self._event("response.created", response=self._response)]
            written += [self._event("response.in_progress", response=self._response)]
        for choice in chunk.choices[:1]:
            self._finish_reason = choice.finish_reason or self._finish_reason
            if (delta := choice.delta) is None:
                continue
            if delta.thought:
                written.append(self._text_delta("reasoning", "reasoning_text", delta.thought, []))
            elif self._has_logprobs and not delta.tool_calls:
                self._logprobs += choice.token_logprobs
            if delta.content:
                logprobs, self._logprobs = self._logprobs, []
                written.append(self._text_delta("message", "output_text", delta.content, logprobs))
            written += [self._call_delta(call) for call in delta.tool_calls or ()]
        return b"".join(written)

    def translate_end(self) -> bytes:
        if self._finish_reason not in _FINISHED:
            raise UnreadableAnswer(f"the instance ended its answer with {str(self._finish_reason)[:40]!r}")
        reason = _INCOMPLETE.get(self._finish_reason)
        status = "completed" if reason is None else "incomplete"
        closed = self._close(status)
        self._response |= {
            "status": status,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._items,
            "usage": _usage(self._usage or AnswerUsage()),
        }
        if self._store is not None:
            self._store(self._response)
        return closed + self._event(f"response.{status}", response=self._response)

    # Items and events.

    def _event(self, kind: str, /, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return typed_event(kind, sequence_number=number, **values)

    def _open(self, item: Item) -> bytes:
        """End the open item and begin another."""
        closed = self._close("completed")
        self._items.append(item)
        self._is_open = True
        index, item_id = len(self._items) - 1, item["id"]
        added = self._event("response.output_item.added", output_index=index, item={**item, **_EMPTY[item["type"]]})
        if item["type"] == "function_call":
            return closed + added
        part = self._event(
            "response.content_part.added",
            item_id=item_id,
            output_index=index,
            content_index=0,
            part=item["content"][0],
        )
        return closed + added + part

    def _close(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item, position = self._items[-1], self._position()
        item["status"], text = status, "".join(self._chunks)
        self._chunks.clear()
        if item["type"] == "function_call":
            item["arguments"] = text
            call = {name: item[name] for name in ("name", "arguments")}
            done = self._event("response.function_call_arguments.done", **position, **call)
        else:
            [part] = item["content"]
            part["text"] = text
            done = self._event(f"response.{part['type']}.done", **position, content_index=0, **_text_of(part))
            done += self._event("response.content_part.done", **position, content_index=0, part=part)
        return done + self._event("response.output_item.done", output_index=position["output_index"], item=item)

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _text_delta(self, item_type: str, part_type: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        begin = b""
        if not self._is_open or self._items[-1]["type"] != item_type:
            begin = self._open(_message() if item_type == "message" else _reasoning())
        self._chunks.append(text)
        values: dict[str, Any] = {"delta": text}
        if part_type == "output_text":
            self._items[-1]["content"][0]["logprobs"] += logprobs
            values["logprobs"] = logprobs
        return begin + self._event(f"response.{part_type}.delta", **self._position(), content_index=0, **values)

    def _call_delta(self, call: CalledTool) -> bytes:
        number, begin = self._num_calls if call.index is None else call.index, b""
        is_last = self._is_open and self._items[-1]["type"] == "function_call" and number == self._num_calls - 1
        if not is_last:
            if number < self._num_calls:
                raise UnreadableAnswer("the instance's tool calls are interleaved")
            begin, self._num_calls = self._open(_function_call(call)), number + 1
        if not (arguments := call.function.arguments):
            return begin
        self._chunks.append(arguments)
        return begin + self._event("response.function_call_arguments.delta", **self._position(), delta=arguments)


_EMPTY: dict[str, Item] = {"message": {"content": []}, "reasoning": {"content": []}, "function_call": {}}
"""Fields of an item that begins, of which the rest comes in events."""

_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of this API, by the chat's fields that they become."""


def _renamed(error: RequestError) -> RequestError:
    """The error with the name of the client's field."""
    name, dot, rest = (error.param or "").partition(".")
    if name not in _RENAMED:
        return error
    return InstanceError(error.status, error.kind, error.message, f"{_RENAMED[name]}{dot}{rest}", error_code(error))


def _message() -> Item:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    head = {"id": f"msg_{secret_hex()}", "type": "message", "role": "assistant", "status": "in_progress"}
    return {**head, "content": [part]}


def _reasoning() -> Item:
    part = {"type": "reasoning_text", "text": ""}
    head = {"id": f"rs_{secret_hex()}", "type": "reasoning", "status": "in_progress", "summary": []}
    return {**head, "content": [part]}


def _function_call(call: CalledTool) -> Item:
    if not (call.id and call.function.name):
        raise UnreadableAnswer("a tool call of the instance has no id or no name")
    head = {"id": f"fc_{secret_hex()}", "type": "function_call", "status": "in_progress"}
    return {**head, "call_id": call.id, "name": call.function.name, "arguments": ""}


def _text_of(part: Item) -> Item:
    """The fields of the event that ends a part's text."""
    return {name: part[name] for name in ("text", "logprobs") if name in part}


def _usage(usage: AnswerUsage) -> Item:
    num_output = usage.completion_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.prompt_tokens + num_output,
    }


def _head(response_id: str, request: ResponsesRequest, created: float) -> Item:
    """A response that has begun."""
    text = {"format": {"type": "text"}} if request.text is None else without_none(**msgspec.to_builtins(request.text))
    if "format" in text:
        text["format"] = without_none(**text["format"])
    reasoning = request.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model or "",
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": text,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": function_tools(request),
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }
