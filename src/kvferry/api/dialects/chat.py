"""The chat's answers as translations read them: kvferry's, vLLM's and SGLang's, with the fields that matter here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from kvferry.core.errors import RequestError


class Details(msgspec.Struct):
    """Details of a number of tokens."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    """Numbers of tokens. `prompt_tokens` includes the cached ones."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens that were not computed."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    @property
    def num_reasoning(self) -> int:
        """Number of answer tokens of the model's reasoning, as far as the engine counts them."""
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


class Function(msgspec.Struct):
    """A called function, or the new part of a call."""

    name: str | None = None
    arguments: str | None = None


class CalledTool(msgspec.Struct):
    """A tool call, or its new part in a stream."""

    index: int | None = None
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class AnswerMessage(msgspec.Struct):
    """An answer, or its new part in a stream."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None

    @property
    def thought(self) -> str:
        """The model's reasoning, under either of its names."""
        return self.reasoning or self.reasoning_content or ""


class AnswerChoice(msgspec.Struct):
    """The only choice. `stop_reason`: the matched stop string or token in vLLM and kvferry, `matched_stop` in
    SGLang."""

    message: AnswerMessage | None = None
    delta: AnswerMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    logprobs: dict[str, Any] | None = None

    @property
    def was_stopped(self) -> bool:
        """True if one of the client's stop strings or tokens ended the answer. SGLang's `matched_stop` may also be the
        model's end token."""
        return self.finish_reason == "stop" and (self.stop_reason is not None or isinstance(self.matched_stop, str))

    @property
    def stop_string(self) -> str | None:
        """The client's stop string that ended the answer."""
        stop = self.matched_stop if self.stop_reason is None else self.stop_reason
        return stop if isinstance(stop, str) and self.finish_reason == "stop" else None

    @property
    def token_logprobs(self) -> list[dict[str, Any]]:
        """OpenAI's log-probabilities of the tokens in this part of the answer."""
        content = (self.logprobs or {}).get("content")
        return content if isinstance(content, list) else []


class ChatAnswer(msgspec.Struct):
    """A whole answer, or a chunk of a stream."""

    choices: list[AnswerChoice] = []
    model: str = ""
    usage: AnswerUsage | None = None
    error: Any = None


class UnreadableAnswer(RequestError):
    """502: an instance's answer is not an answer of the chat API."""

    status = 502
    kind = "bad_gateway_error"
    code = "bad_answer"


class InstanceError(RequestError):
    """An instance's own error, with its status."""

    def __init__(self, status: int, kind: str, message: str, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param)
        self.status, self.kind, self.code = status, kind, code


_STATUSES = {"invalid_request_error": 400, "rate_limit_error": 429, "unavailable_error": 503, "timeout_error": 504}
_ANSWER = msgspec.json.Decoder(ChatAnswer)


def read_error(content: Any, status: int = 0) -> InstanceError:
    """An error object as instances send it. `status`: of the answer; 0: it is the last event of a stream."""
    error = content.get("error", content) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        error = {"message": error if isinstance(error, str) else "the instance gave no reason"}
    kind, code, param = (error.get(name) for name in ("type", "code", "param"))
    kind = kind if isinstance(kind, str) else "server_error"
    if not status:
        status = code if isinstance(code, int) and 400 <= code < 600 else _STATUSES.get(kind, 500)
    message = error.get("message", content.get("detail") if isinstance(content, dict) else None)
    return InstanceError(
        status,
        kind,
        message if isinstance(message, str) else "the instance gave no reason",
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )


def read_error_body(content: bytes, status: int) -> InstanceError:
    """The error of an instance's answer with this status."""
    try:
        return read_error(msgspec.json.decode(content), status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return read_error(content[:2000].decode("utf-8", "replace"), status)


class EventReader:
    """Divides a stream into the data of its events."""

    max_event_bytes = 16 * 2**20

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now. Raises `UnreadableAnswer` for an event without an end."""
        data = self._partial + data
        *events, self._partial = data.split(b"\n\n")
        if len(self._partial) > self.max_event_bytes:
            raise UnreadableAnswer("an event of the instance's stream has no end")
        return [payload for event in events if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    """The data of an event; empty for comments, which kvferry's progress marks are too."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class ChatTranslation(ABC):
    """Translates the answer of one chat request. A stream ends with an answer's end or with an error, never without
    either."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._reader = EventReader()
        self._over = False
        """The last event has been written."""

    @abstractmethod
    def body(self, error: RequestError, request_id: str) -> bytes:
        """The JSON body of an answer that is this error."""

    @abstractmethod
    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        """The last event of a stream that ends with this error."""

    @abstractmethod
    def translate_answer(self, answer: ChatAnswer, choice: AnswerChoice) -> Any:
        """The whole answer, to be encoded as JSON. Raises `UnreadableAnswer`."""

    @abstractmethod
    def translate_chunk(self, chunk: ChatAnswer) -> bytes:
        """The events for a chunk of a stream. Raises `UnreadableAnswer`."""

    @abstractmethod
    def translate_end(self) -> bytes:
        """The last events of a complete stream. Raises `UnreadableAnswer`."""

    def answer(self, status: int, content: bytes) -> bytes:
        """The body for an instance's unstreamed answer. Raises `UnreadableAnswer`."""
        if status >= 400:
            return self.body(read_error_body(content, status), self._request_id)
        answer = _decode(content)
        if not answer.choices or answer.choices[0].message is None:
            raise UnreadableAnswer("the instance's answer has no choice")
        return msgspec.json.encode(self.translate_answer(answer, answer.choices[0]))

    def events(self, data: bytes) -> bytes:
        """The events for the next chunk of an instance's stream. Raises nothing: an error is the last event."""
        written = []
        try:
            for payload in self._reader.feed(data):
                if self._over:
                    break
                if payload == b"[DONE]":
                    written.append(self.translate_end())
                    self._over = True
                    continue
                chunk = _decode(payload)
                if chunk.error is not None:
                    raise read_error({"error": chunk.error})
                written.append(self.translate_chunk(chunk))
        except RequestError as error:
            written.append(self._fail(error))
        return b"".join(written)

    def end(self) -> bytes:
        """The last events of a stream whose instance has ended it."""
        if self._over:
            return b""
        return self._fail(UnreadableAnswer("the instance ended its answer early, which is incomplete"))

    def _fail(self, error: RequestError) -> bytes:
        self._over = True
        return self.stream_end(error, self._request_id)


def _decode(content: bytes) -> ChatAnswer:
    try:
        return _ANSWER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableAnswer(f"the instance's answer cannot be read: {error}") from error


def typed_event(kind: str, /, **values: Any) -> bytes:
    """A server-sent event whose data has its name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **values}))
