"""What completions and chat completions have in common in how they are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvferry.engine.server import responses
from kvferry.engine.server.assembly import Delta
from kvferry.engine.server.logprobs import LogprobWriter
from kvferry.engine.server.planning import Plan
from kvferry.engine.server.protocol import GenerationRequest
from kvferry.engine.server.token_texts import TokenTexts


class AnswerWriter(ABC):
    """Writes one request's deltas in the form its route promises. Holds no text: each delta is written once."""

    def __init__(
        self, body: GenerationRequest, plan: Plan, texts: TokenTexts, *, answer_id: str, model: str, created: int
    ) -> None:
        self.plan = plan
        self.generation = plan.generation
        self._head: dict[str, Any] = {"id": answer_id, "model": model, "created": created}
        self._logprobs = LogprobWriter(texts, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._returns_token_ids = bool(body.return_token_ids)
        self._returns_timeline = bool(body.return_timeline)
        self._num_prompt_logprobs = body.prompt_logprobs
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)

    @abstractmethod
    def events(self, delta: Delta) -> list[responses.Answer]:
        """The chunks that `delta` is worth; none when there is nothing to tell yet."""

    @abstractmethod
    def whole(self, choices: Sequence[Delta]) -> responses.Answer:
        """The answer in one piece."""

    @abstractmethod
    def _chunk(self, choices: list[Any], **fields: Any) -> responses.Answer:
        """A chunk of this route's kind."""

    def last_events(self) -> list[responses.Answer]:
        """What comes after all choices have ended."""
        if not self._include_usage:
            return []
        return [self._chunk([], usage=self.generation.usage(), **self._closing_fields())]

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """What goes with a chunk beside its choice."""
        fields: dict[str, Any] = {}
        if self._continuous_usage:
            fields["usage"] = self.generation.usage(delta.index)
        if delta.finish_reason is not None and self.generation.num_unfinished == 0:
            fields |= self._closing_fields()
        return fields

    def _closing_fields(self) -> dict[str, Any]:
        """What the end of the answer carries: the ticket of a hand-off, and the timeline when it was asked for."""
        timeline = self.generation.timeline if self._returns_timeline else None
        return {"kv_transfer_params": self.generation.ticket, "timeline": timeline}

    def _prompt_logprobs(self, delta: Delta) -> responses.PromptLogprobs | None:
        if self._num_prompt_logprobs is None or delta.prompt_logprobs is None:
            return None
        return self._logprobs.prompt(delta.prompt_logprobs, self._num_prompt_logprobs)

    def _worth_sending(self, delta: Delta, logprobs: object) -> bool:
        """Tokens whose text is held back, or is none, are no event, unless something else is to be told of them."""
        return bool(
            delta.text
            or delta.finish_reason is not None
            or logprobs is not None
            or (delta.token_ids and (self._returns_token_ids or self._continuous_usage))
        )
