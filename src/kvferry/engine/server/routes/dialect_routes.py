"""The routes of other APIs, which are translated to the engine's own (`api.dialects`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvferry.api.decoding import require_json
from kvferry.api.dialects.translated import CHAT_PATH, TOKENIZE_PATH
from kvferry.api.dialects.translator import TRANSLATED_PATHS, Translator
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route
from kvferry.http.server.stored_responses import StoredResponses, owner_of

Answer = Callable[[HttpRequest, Response, bytes], Awaitable[None]]
"""Answers a request with this body."""


class DialectRoutes:
    """Translates requests for the engine's routes."""

    def __init__(self, translator: Translator, chat: Answer, tokenize: Answer) -> None:
        self._translator = translator
        self._answers = {CHAT_PATH: chat, TOKENIZE_PATH: tokenize}

    def routes(self) -> list[Route]:
        """All routes."""
        translated = [Route("POST", path, self.translate) for path in TRANSLATED_PATHS]
        return [*translated, *StoredResponses(self._translator.responses).routes()]

    async def translate(self, request: HttpRequest, response: Response) -> None:
        """Answer a request of another API."""
        raw = await request.body.read()
        require_json(request.header("content-type"), request.header("content-encoding"))
        translated = await self._translator.translate(request.path, raw, request.id, owner_of(request))
        response.translate(translated.translation)
        await self._answers[translated.path](request, response, translated.body)
