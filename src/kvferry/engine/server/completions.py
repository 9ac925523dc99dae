"""How text completions are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.core.hand_off import TokenLogprobs
from kvferry.engine.server import responses
from kvferry.engine.server.answers import AnswerWriter
from kvferry.engine.server.assembly import Delta
from kvferry.engine.server.echo import Echo
from kvferry.engine.server.planning import Plan
from kvferry.engine.server.protocol import CompletionRequest
from kvferry.engine.server.token_texts import TokenTexts


class CompletionWriter(AnswerWriter):
    """Writes `/v1/completions`. `echoes` has one entry a prompt, or none at all."""

    def __init__(
        self, body: CompletionRequest, plan: Plan, texts: TokenTexts, echoes: Sequence[Echo] = (), **head: Any
    ) -> None:
        super().__init__(body, plan, texts, **head)
        self._num_logprobs = body.logprobs
        self._echoes = echoes

    def events(self, delta: Delta) -> list[responses.Answer]:
        """One chunk, or none."""
        choice = self._choice(delta)
        if not (choice.text or self._worth_sending(delta, choice.logprobs)):
            return []
        return [self._chunk([choice], **self._fields(delta))]

    def whole(self, choices: Sequence[Delta]) -> responses.Answer:
        """The completions in the order of their indices."""
        written = [self._choice(delta) for delta in choices]
        return self._chunk(written, usage=self.generation.usage(), **self._closing_fields())

    def _chunk(self, choices: list[Any], **fields: Any) -> responses.Answer:
        return responses.Completion(object="text_completion", choices=choices, **self._head, **fields)

    def _choice(self, delta: Delta) -> responses.CompletionChoice:
        if not self.plan.shows_answer:
            delta.text, delta.token_ids, delta.offsets, delta.logprobs = "", [], [], []
        echo = self._echo_of(delta)
        prompt_token_ids = self.plan.prompt_of(delta.index).token_ids
        return responses.CompletionChoice(
            index=delta.index,
            text=(echo.text if echo is not None and delta.first else "") + delta.text,
            logprobs=None if self._num_logprobs is None else self._choice_logprobs(delta, echo, self._num_logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._returns_token_ids else None,
            prompt_token_ids=prompt_token_ids if self._returns_token_ids and delta.first else None,
            prompt_logprobs=self._prompt_logprobs(delta),
        )

    def _choice_logprobs(self, delta: Delta, echo: Echo | None, num_top: int) -> responses.CompletionLogprobs | None:
        places: list[TokenLogprobs | None] = [*delta.logprobs]
        token_ids, offsets = delta.token_ids, delta.offsets
        if echo is not None:
            offsets = [len(echo.text) + offset for offset in offsets]
            if delta.first:
                prompt_token_ids = self.plan.prompt_of(delta.index).token_ids
                places = [*(delta.prompt_logprobs or [None] * len(prompt_token_ids)), *places]
                token_ids, offsets = [*prompt_token_ids, *token_ids], [*echo.offsets, *offsets]
        return self._logprobs.completion(places, token_ids, offsets, num_top) if token_ids else None

    def _echo_of(self, delta: Delta) -> Echo | None:
        return self._echoes[delta.index // self.plan.num_choices] if self._echoes else None
