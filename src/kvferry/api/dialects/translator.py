"""Translates the requests of all other APIs, by their paths."""

from __future__ import annotations

import asyncio

from kvferry.api.decoding import THREAD_ABOVE_BYTES
from kvferry.api.dialects.messages import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    translate_messages,
    translate_token_count,
)
from kvferry.api.dialects.translated import Translated

TRANSLATED_PATHS = {MESSAGES_PATH: translate_messages, COUNT_TOKENS_PATH: translate_token_count}
"""The paths of requests that are translated."""


class Translator:
    """Translates requests to `TRANSLATED_PATHS`."""

    async def translate(self, path: str, raw: bytes, request_id: str) -> Translated:
        """Translate a request. Raises `InvalidRequest`."""
        translate = TRANSLATED_PATHS[path]
        if len(raw) > THREAD_ABOVE_BYTES:
            return await asyncio.to_thread(translate, raw, request_id)
        return translate(raw, request_id)
