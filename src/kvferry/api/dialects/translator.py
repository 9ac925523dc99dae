"""Translates requests of Anthropic's API and of OpenAI's Responses API to chat requests. Knows the stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvferry.api.decoding import THREAD_ABOVE_BYTES
from kvferry.api.dialects.messages import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    translate_messages,
    translate_token_count,
)
from kvferry.api.dialects.response_store import ResponseStore, StoredResponse, compress_items
from kvferry.api.dialects.responses import (
    INPUT_TOKENS_PATH,
    RESPONSES_PATH,
    InputTokensRequest,
    ResponsesRequest,
    chat_prompt,
    chat_request,
    input_items,
    read_input_tokens_request,
    read_responses_request,
)
from kvferry.api.dialects.responses_answer import ResponsesTranslation
from kvferry.api.dialects.token_count import TokenCountTranslation
from kvferry.api.dialects.translated import CHAT_PATH, TOKENIZE_PATH, TranslatedRequest
from kvferry.core.clock import Clock
from kvferry.core.entropy import secret_hex
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.dialects import ResponsesErrors
from kvferry.core.messages.openai import MAX_BODY_BYTES, BodyTooLarge

TRANSLATED_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH, RESPONSES_PATH, INPUT_TOKENS_PATH)
"""The paths of requests that are translated."""

_COMPRESSION_RATIO = 8
"""Assumed bytes of stored items for each of their compressed bytes."""

Result = TypeVar("Result")


class PreviousResponseNotFound(InvalidRequest):
    """400: there is no stored response of this id that belongs to the client's key."""

    code = "previous_response_not_found"


class Translator:
    """Translates requests to `TRANSLATED_PATHS`. `max_bytes`: maximum bytes of the items of a conversation, which grows
    with each turn although the requests are short."""

    def __init__(self, responses: ResponseStore, clock: Clock, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.responses, self._clock, self._max_bytes = responses, clock, max_bytes

    async def translate(self, path: str, raw: bytes, request_id: str, owner: bytes) -> TranslatedRequest:
        """Translate a request. `owner`: names the client that may read the stored response
        (`http.server.stored_responses.owner_of`). Raises `InvalidRequest`, `BodyTooLarge`, and `Unavailable` if the
        stored responses cannot be reached."""
        size = len(raw)
        match path:
            case "/v1/messages":
                return await _run(size, lambda: translate_messages(raw, request_id))
            case "/v1/messages/count_tokens":
                return await _run(size, lambda: translate_token_count(raw, request_id))
            case "/v1/responses":
                request = await _run(size, lambda: read_responses_request(raw))
                previous = self._previous(request, owner)
                size += 0 if previous is None else len(previous.items) * _COMPRESSION_RATIO
                return await _run(size, lambda: self._translate_response(request, previous, request_id, owner))
            case _:
                count_request = await _run(size, lambda: read_input_tokens_request(raw))
                previous = self._previous(count_request, owner)
                size += 0 if previous is None else len(previous.items) * _COMPRESSION_RATIO
                return await _run(size, lambda: self._translate_input_tokens(count_request, previous, request_id))

    def _previous(self, request: InputTokensRequest, owner: bytes) -> StoredResponse | None:
        if request.previous_response_id is None:
            return None
        previous = self.responses.get(request.previous_response_id, owner)
        if previous is None:
            raise PreviousResponseNotFound(
                f"there is no stored response {request.previous_response_id[:80]!r}: it was not stored, was deleted,"
                " has expired, or belongs to another key",
                param="previous_response_id",
            )
        return previous

    def _translate_response(
        self, request: ResponsesRequest, previous: StoredResponse | None, request_id: str, owner: bytes
    ) -> TranslatedRequest:
        response_id = f"resp_{secret_hex()}"
        items = self._conversation(request, previous)
        body = chat_request(request, items)
        session = response_id if previous is None else previous.session
        store = None
        if request.store is not False:
            compressed = compress_items(items)

            def store(response: dict[str, Any]) -> None:
                content = msgspec.json.encode(response)
                self.responses.put(StoredResponse(response_id, owner, session, compressed, content))

        elif previous is None:
            session = ""
        translation = ResponsesTranslation(request_id, response_id, request, self._clock.wall(), store)
        return TranslatedRequest(CHAT_PATH, body, translation, request.prompt_cache_key or session)

    def _translate_input_tokens(
        self, request: InputTokensRequest, previous: StoredResponse | None, request_id: str
    ) -> TranslatedRequest:
        body = msgspec.json.encode(chat_prompt(request, self._conversation(request, previous)))
        head = {"object": "response.input_tokens"}
        translation = TokenCountTranslation(
            request_id, ResponsesErrors(), lambda count: {**head, "input_tokens": count}
        )
        return TranslatedRequest(TOKENIZE_PATH, body, translation)

    def _conversation(self, request: InputTokensRequest, previous: StoredResponse | None) -> list[dict[str, Any]]:
        """The items of all turns. Raises `BodyTooLarge`."""
        items = input_items(request)
        if previous is None:
            return items
        items = [*previous.input_items(), *msgspec.json.decode(previous.response)["output"], *items]
        if (size := len(msgspec.json.encode(items))) > self._max_bytes:
            raise BodyTooLarge(
                f"the conversation has {size} bytes; at most {self._max_bytes} are accepted",
                param="previous_response_id",
            )
        return items


async def _run(size: int, function: Callable[[], Result]) -> Result:
    """Call the function, in a thread if it would block the event loop for too long."""
    return await asyncio.to_thread(function) if size > THREAD_ABOVE_BYTES else function()
