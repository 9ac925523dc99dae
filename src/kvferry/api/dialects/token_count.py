"""The number of a prompt's tokens, by an instance's /tokenize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.api.dialects.chat import UnreadableAnswer, read_error_body
from kvferry.core.errors import RequestError
from kvferry.core.messages.dialects import ErrorDialect


class TokenCount(msgspec.Struct):
    """The answer of an instance's /tokenize."""

    count: int


class TokenCountTranslation:
    """Translates the number of a prompt's tokens. `make_answer`: makes the answer for a number."""

    def __init__(self, request_id: str, dialect: ErrorDialect, make_answer: Callable[[int], dict[str, Any]]) -> None:
        self._request_id, self._dialect, self._make_answer = request_id, dialect, make_answer

    def body(self, error: RequestError, request_id: str) -> bytes:
        """The JSON body of an answer that is this error."""
        return self._dialect.body(error, request_id)

    def stream_end(self, error: RequestError, request_id: str) -> bytes:
        """The last event of a stream that ends with this error."""
        return self._dialect.stream_end(error, request_id)

    def answer(self, status: int, content: bytes) -> bytes:
        """The body for an instance's answer. Raises `UnreadableAnswer`."""
        if status >= 400:
            return self.body(read_error_body(content, status), self._request_id)
        try:
            count = msgspec.json.decode(content, type=TokenCount).count
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnreadableAnswer(f"the instance's number of tokens cannot be read: {error}") from error
        return msgspec.json.encode(self._make_answer(count))

    def events(self, data: bytes) -> bytes:
        """Nothing: an instance has no reason to send a stream."""
        return b""

    def end(self) -> bytes:
        """The last event of a stream."""
        return self.stream_end(UnreadableAnswer("the instance sent a stream of events"), self._request_id)
