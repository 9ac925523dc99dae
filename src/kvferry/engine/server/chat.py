"""How chat completions are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.engine.server import responses
from kvferry.engine.server.answers import AnswerWriter
from kvferry.engine.server.assembly import Delta
from kvferry.engine.server.parameters import num_logprobs
from kvferry.engine.server.planning import Plan
from kvferry.engine.server.protocol import ChatCompletionRequest
from kvferry.engine.server.token_texts import TokenTexts

_ROLE = "assistant"


class ChatWriter(AnswerWriter):
    """Writes `/v1/chat/completions`."""

    def __init__(self, body: ChatCompletionRequest, plan: Plan, texts: TokenTexts, **head: Any) -> None:
        super().__init__(body, plan, texts, **head)
        self._num_logprobs = num_logprobs(body)

    def events(self, delta: Delta) -> list[responses.Answer]:
        """A choice's first chunk says whose words follow."""
        chunks = [self._opening(delta)] if delta.first else []
        logprobs = self._choice_logprobs(delta)
        if not self._worth_sending(delta, logprobs):
            return chunks
        choice = responses.ChatChunkChoice(
            index=delta.index,
            delta=responses.ChatMessage(content=delta.text) if delta.text else responses.ChatMessage(),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._returns_token_ids else None,
        )
        return [*chunks, self._chunk([choice], **self._fields(delta))]

    def whole(self, choices: Sequence[Delta]) -> responses.Answer:
        """The answers in the order of their indices."""
        return responses.ChatCompletion(
            object="chat.completion",
            choices=[self._choice(delta) for delta in choices],
            usage=self.generation.usage(),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=self._prompt_logprobs(choices[0]),
            **self._head,
            **self._closing_fields(),
        )

    def _chunk(self, choices: list[Any], **fields: Any) -> responses.Answer:
        return responses.ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **self._head, **fields)

    def _opening(self, delta: Delta) -> responses.Answer:
        choice = responses.ChatChunkChoice(
            index=delta.index,
            delta=responses.ChatMessage(role=_ROLE, content=""),
            logprobs=None,
            finish_reason=None,
        )
        usage = self.generation.usage(delta.index) if self._continuous_usage else None
        return self._chunk([choice], prompt_token_ids=self._prompt_token_ids(), usage=usage)

    def _choice(self, delta: Delta) -> responses.ChatChoice:
        return responses.ChatChoice(
            index=delta.index,
            message=responses.ChatMessage(role=_ROLE, content=delta.text),
            logprobs=self._choice_logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._returns_token_ids else None,
        )

    def _choice_logprobs(self, delta: Delta) -> responses.ChatLogprobs | None:
        if self._num_logprobs is None or not delta.token_ids:
            return None
        return self._logprobs.chat(delta.logprobs, self._num_logprobs)

    def _prompt_token_ids(self) -> list[int] | None:
        return self.plan.prompts[0].token_ids if self._returns_token_ids else None
