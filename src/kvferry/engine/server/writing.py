"""The form of answers: completions and chat completions, in one response or streamed, with log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

import msgspec

from kvferry.api import answers
from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.messages.timeline import since_arrival
from kvferry.core.sampling import MIN_LOGPROB
from kvferry.engine.server.assembly import Delta
from kvferry.engine.server.output_parsers.answer_reader import NumberedCall, join_calls
from kvferry.engine.server.parameters import num_logprobs
from kvferry.engine.server.planning import Plan
from kvferry.engine.server.prompts import Echo
from kvferry.engine.server.text_codec import TokenTexts


class LogprobWriter:
    """Writes log-probabilities. `as_token_ids`: tokens are named `token_id:123`, as in vLLM. `by_id`: the request has
    named the tokens of each position (`logprob_token_ids`), and all are listed after the position's own."""

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool = False, by_id: bool = False) -> None:
        self._texts = texts
        self._as_token_ids = as_token_ids
        self._by_id = by_id

    def completion(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offsets: Sequence[int], num_top: int
    ) -> answers.CompletionLogprobs:
        """The `num_top` most likely tokens at each position, and the token itself if it is not among them."""
        return answers.CompletionLogprobs(
            text_offset=list(offsets),
            token_logprobs=[None if entry is None else _clamp(entry.logprob) for entry in logprobs],
            tokens=[self._name(token_id) for token_id in token_ids],
            top_logprobs=[None if entry is None else self._top(entry, num_top) for entry in logprobs],
        )

    def chat(self, logprobs: Sequence[TokenLogprobs], num_top: int) -> answers.ChatLogprobs:
        """The `num_top` most likely tokens at each position, which may not include the token itself."""
        return answers.ChatLogprobs([self._chat_token(entry, num_top) for entry in logprobs])

    def prompt(self, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> answers.PromptLogprobs:
        """vLLM's form for prompts: by token id, the token itself first."""
        return [None if entry is None else self._prompt_token(entry, num_top) for entry in logprobs]

    def _top(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        listed = entry.top.items() if self._by_id else _top_tokens(entry, num_top)
        top = {self._name(token_id): _clamp(logprob) for token_id, logprob in listed}
        return {self._name(entry.token_id): _clamp(entry.logprob)} | top

    def _chat_token(self, entry: TokenLogprobs, num_top: int) -> answers.TokenLogprob:
        top = [
            answers.TopLogprob(self._name(token_id), _clamp(logprob), list(self._texts.raw(token_id)))
            for token_id, logprob in (entry.top.items() if self._by_id else _top_tokens(entry, num_top))
        ]
        name, raw = self._name(entry.token_id), list(self._texts.raw(entry.token_id))
        return answers.TokenLogprob(name, _clamp(entry.logprob), raw, top)

    def _prompt_token(self, entry: TokenLogprobs, num_top: int) -> dict[int, answers.PromptLogprob]:
        entries = {entry.token_id: self._prompt_logprob(entry.token_id, entry.logprob, entry.rank)}
        top = {
            token_id: self._prompt_logprob(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(_top_tokens(entry, num_top), start=1)
        }
        return entries | top

    def _prompt_logprob(self, token_id: int, logprob: float, rank: int) -> answers.PromptLogprob:
        return answers.PromptLogprob(_clamp(logprob), rank, self._texts.text(token_id))

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._texts.name(token_id)


def _top_tokens(entry: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    ranked = sorted(entry.top.items(), key=lambda item: -item[1])
    return islice(ranked, num_top)


def _clamp(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class AnswerWriter(ABC):
    """Writes one request's deltas in the form of its route. Keeps no text: each delta is written once."""

    def __init__(
        self, body: GenerationRequest, plan: Plan, texts: TokenTexts, *, answer_id: str, model: str, created: int
    ) -> None:
        self.plan = plan
        self.generation = plan.generation
        self.created = created
        self._head: dict[str, Any] = {"id": answer_id, "model": model, "created": created}
        self._logprobs = LogprobWriter(
            texts, as_token_ids=bool(body.return_tokens_as_token_ids), by_id=bool(body.logprob_token_ids)
        )
        self._returns_token_ids = bool(body.return_token_ids)
        self._returns_timeline = bool(body.return_timeline)
        self._num_prompt_logprobs = body.prompt_logprobs
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)

    @abstractmethod
    def events(self, delta: Delta) -> list[answers.ApiAnswer]:
        """The chunks for `delta`; none if there is nothing to send yet."""

    @abstractmethod
    def full_response(self, choices: Sequence[Delta]) -> answers.ApiAnswer:
        """The whole answer as one response."""

    @abstractmethod
    def _chunk(self, choices: list[Any], **fields: Any) -> answers.ApiAnswer:
        """A chunk in the form of this route."""

    def last_events(self) -> list[answers.ApiAnswer]:
        """The events after the end of all choices: the usage, if requested."""
        if not self._include_usage:
            return []
        return [self._chunk([], usage=self.generation.usage(), **self._closing_fields())]

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """The fields of a chunk besides its choice."""
        fields: dict[str, Any] = {}
        if self._continuous_usage:
            fields["usage"] = self.generation.usage(delta.index)
        if delta.finish_reason is not None and self.generation.num_unfinished == 0:
            fields |= self._closing_fields()
        return fields

    def _closing_fields(self) -> dict[str, Any]:
        """The fields at the end of the answer: the ticket of a hand-off, and the timeline if requested."""
        timeline = self.generation.timeline if self._returns_timeline else None
        return {
            "kv_transfer_params": self.generation.ticket,
            "timeline": timeline,
            "timeline_ms": None if timeline is None else since_arrival(timeline),
        }

    def _prompt_logprobs(self, delta: Delta) -> answers.PromptLogprobs | None:
        if self._num_prompt_logprobs is None or delta.prompt_logprobs is None:
            return None
        return self._logprobs.prompt(delta.prompt_logprobs, self._num_prompt_logprobs)

    def _has_content(self, delta: Delta, logprobs: object) -> bool:
        """True if an event is sent for this delta: not for tokens without text, unless the event has other content."""
        return bool(
            delta.text
            or delta.reasoning
            or delta.calls
            or delta.finish_reason is not None
            or logprobs is not None
            or (delta.token_ids and (self._returns_token_ids or self._continuous_usage))
        )


class CompletionWriter(AnswerWriter):
    """Writes `/v1/completions`. `echoes`: one for each prompt, or none at all."""

    def __init__(
        self, body: CompletionRequest, plan: Plan, texts: TokenTexts, echoes: Sequence[Echo] = (), **head: Any
    ) -> None:
        super().__init__(body, plan, texts, **head)
        self._num_logprobs = body.logprobs
        self._echoes = echoes

    def events(self, delta: Delta) -> list[answers.ApiAnswer]:
        """One chunk, or none."""
        choice = self._choice(delta)
        if not (choice.text or self._has_content(delta, choice.logprobs)):
            return []
        return [self._chunk([choice], **self._fields(delta))]

    def full_response(self, choices: Sequence[Delta]) -> answers.ApiAnswer:
        """The completions in the order of their indices."""
        written = [self._choice(delta) for delta in choices]
        return self._chunk(written, usage=self.generation.usage(), **self._closing_fields())

    def _chunk(self, choices: list[Any], **fields: Any) -> answers.ApiAnswer:
        return answers.Completion(object="text_completion", choices=choices, **self._head, **fields)

    def _choice(self, delta: Delta) -> answers.CompletionChoice:
        if not self.plan.shows_answer:
            delta.text, delta.token_ids, delta.offsets, delta.logprobs = "", [], [], []
        echo = self._echo_of(delta)
        prompt_token_ids = self.plan.prompt_of(delta.index).token_ids
        return answers.CompletionChoice(
            index=delta.index,
            text=(echo.text if echo is not None and delta.first else "") + delta.text,
            logprobs=None if self._num_logprobs is None else self._choice_logprobs(delta, echo, self._num_logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._returns_token_ids else None,
            prompt_token_ids=prompt_token_ids if self._returns_token_ids and delta.first else None,
            prompt_logprobs=self._prompt_logprobs(delta),
        )

    def _choice_logprobs(self, delta: Delta, echo: Echo | None, num_top: int) -> answers.CompletionLogprobs | None:
        logprobs: list[TokenLogprobs | None] = [*delta.logprobs]
        token_ids, offsets = delta.token_ids, delta.offsets
        if echo is not None:
            offsets = [len(echo.text) + offset for offset in offsets]
            if delta.first:
                prompt_token_ids = self.plan.prompt_of(delta.index).token_ids
                logprobs = [*(delta.prompt_logprobs or [None] * len(prompt_token_ids)), *logprobs]
                token_ids, offsets = [*prompt_token_ids, *token_ids], [*echo.offsets, *offsets]
        return self._logprobs.completion(logprobs, token_ids, offsets, num_top) if token_ids else None

    def _echo_of(self, delta: Delta) -> Echo | None:
        return self._echoes[delta.index // self.plan.num_choices] if self._echoes else None


_ROLE = "assistant"


def _tool_call(call: NumberedCall, index: int | None) -> answers.MessageToolCall:
    if not call.id:
        return answers.MessageToolCall(index=index, function=answers.FunctionCall(arguments=call.arguments))
    function = answers.FunctionCall(name=call.name, arguments=call.arguments)
    return answers.MessageToolCall(index=index, id=call.id, type="function", function=function)


class ChatWriter(AnswerWriter):
    """Writes `/v1/chat/completions`. `prompt_text`: sent with the answer, if the request asks for it."""

    max_silent: ClassVar[int] = 16
    """Number of tokens after which an event is sent even if it is empty: while a call is read, a router or a client
    would take the stream for lost."""

    def __init__(
        self, body: ChatCompletionRequest, plan: Plan, texts: TokenTexts, prompt_text: str | None = None, **head: Any
    ) -> None:
        super().__init__(body, plan, texts, **head)
        self._prompt_text = prompt_text
        self._num_logprobs = num_logprobs(body)
        self._includes_reasoning = body.include_reasoning is not False
        self._num_silent = [0] * len(plan.generation.children)
        """For each choice, the tokens since its last event."""

    def events(self, delta: Delta) -> list[answers.ApiAnswer]:
        """A choice's first chunk contains its role."""
        chunks = [self._role_chunk(delta)] if delta.first else []
        if not self._includes_reasoning:
            delta.reasoning = ""
        logprobs = self._choice_logprobs(delta)
        num_silent = 0 if chunks else self._num_silent[delta.index] + len(delta.token_ids)
        is_sent = self._has_content(delta, logprobs) or num_silent >= self.max_silent
        self._num_silent[delta.index] = 0 if is_sent else num_silent
        if not is_sent:
            return chunks
        choice = answers.ChatChunkChoice(
            index=delta.index,
            delta=self._message(delta, is_chunk=True),
            logprobs=logprobs,
            finish_reason=self._finish_reason(delta),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._returns_token_ids else None,
        )
        return [*chunks, self._chunk([choice], **self._fields(delta))]

    def full_response(self, choices: Sequence[Delta]) -> answers.ApiAnswer:
        """The answers in the order of their indices."""
        return answers.ChatCompletion(
            object="chat.completion",
            choices=[self._choice(delta) for delta in choices],
            usage=self.generation.usage(),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_text=self._prompt_text,
            prompt_logprobs=self._prompt_logprobs(choices[0]),
            **self._head,
            **self._closing_fields(),
        )

    def _chunk(self, choices: list[Any], **fields: Any) -> answers.ApiAnswer:
        return answers.ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **self._head, **fields)

    def _role_chunk(self, delta: Delta) -> answers.ApiAnswer:
        choice = answers.ChatChunkChoice(
            index=delta.index,
            delta=answers.ChatMessage(role=_ROLE, content=""),
            logprobs=None,
            finish_reason=None,
        )
        usage = self.generation.usage(delta.index) if self._continuous_usage else None
        prompt = {"prompt_token_ids": self._prompt_token_ids(), "prompt_text": self._prompt_text}
        return self._chunk([choice], usage=usage, **prompt)

    def _choice(self, delta: Delta) -> answers.ChatChoice:
        return answers.ChatChoice(
            index=delta.index,
            message=self._message(delta),
            logprobs=self._choice_logprobs(delta),
            finish_reason=self._finish_reason(delta),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._returns_token_ids else None,
        )

    def _message(self, delta: Delta, *, is_chunk: bool = False) -> answers.ChatMessage:
        """The choice's message, or its new part."""
        reasoning = (delta.reasoning or None) if self._includes_reasoning else None
        calls = [_tool_call(call, call.index if is_chunk else None) for call in join_calls(delta.calls)]
        content: str | msgspec.UnsetType | None = delta.text
        if not delta.text and is_chunk:
            content = msgspec.UNSET
        elif not delta.text and (calls or delta.reasoning):
            content = None
        return answers.ChatMessage(
            role=None if is_chunk else _ROLE,
            content=content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or None,
        )

    @staticmethod
    def _finish_reason(delta: Delta) -> str | None:
        return "tool_calls" if delta.ends_with_calls else delta.finish_reason

    def _choice_logprobs(self, delta: Delta) -> answers.ChatLogprobs | None:
        if self._num_logprobs is None or not delta.token_ids:
            return None
        return self._logprobs.chat(delta.logprobs, self._num_logprobs)

    def _prompt_token_ids(self) -> list[int] | None:
        return self.plan.prompts[0].token_ids if self._returns_token_ids else None
