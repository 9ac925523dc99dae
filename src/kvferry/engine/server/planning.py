"""Plans the sequences that answer a request, from its body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvferry.api.structured_outputs import constraint_of
from kvferry.core import entropy
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.continuation import Continuation, parse_continuation
from kvferry.core.messages.hand_off import Consume, HandOff, Produce
from kvferry.core.messages.kv_keys import KVTransferParams
from kvferry.core.messages.timeline import Timeline
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams, child_seed
from kvferry.core.structured_outputs import StructuredOutputs
from kvferry.engine.server.assembly import CONTINUED, ChoiceAssembler, TextOptions
from kvferry.engine.server.chat_answers import ChatAnswerSpec, chat_answers
from kvferry.engine.server.context import ServerContext
from kvferry.engine.server.generation import Child, Generation
from kvferry.engine.server.parameters import (
    hand_off_of,
    num_choices,
    require_consistent,
    sampling_params,
    transfer_params_of,
)
from kvferry.engine.server.prompts import (
    Prompt,
    answer_budget,
    completion_prompts,
    require_known_tokens,
    split_prompts,
    truncate,
)
from kvferry.engine.server.text_codec import THREAD_ABOVE_TOKENS

_OLDEST_STAMP_S = 24 * 3600.0
"""Max age of time stamps: older ones are forged or come from a wrong clock, and would distort the metrics."""


_MANY_TOOLS = 32
"""More tools than this are read in a thread."""


@dataclass(frozen=True)
class Plan:
    """The sequences that answer one request: `num_choices` for each prompt. `shows_answer` False: only the prompt is
    echoed. `continuation`: the part of the answer that the client already has."""

    prompts: list[Prompt]
    num_choices: int
    generation: Generation
    shows_answer: bool = True
    continuation: Continuation | None = None

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self.prompts[index // self.num_choices]


@dataclass(frozen=True)
class AnswerLength:
    """The bound of the answer's length; `max_tokens` None: the context. `field`: the request's field with the
    prompt."""

    field: str
    max_tokens: int | None
    shows_answer: bool = True


async def plan_request(context: ServerContext, body: GenerationRequest, answer_id: str, timeline: Timeline) -> Plan:
    """Validate the request, make its prompts, and prepare its sequences. Nothing runs yet. Raises `RequestError`."""
    require_consistent(body)
    length = answer_length(body)
    engine_id = f"{answer_id}-{entropy.token_hex(4)}"  # clients may repeat their ids
    raw_prompts = split_prompts(body.prompt) if isinstance(body, CompletionRequest) else []
    num_prompts = len(raw_prompts) or 1
    hand_off = hand_off_of(body, engine_id, num_prompts)
    transfer_params = transfer_params_of(body, num_prompts)
    number = num_choices(body, hand_off)
    _require_countable(number, num_prompts, context.config.max_choices)
    continuation = parse_continuation(body.kv_transfer_params)
    if continuation is not None:
        _require_continuable(body, number * num_prompts, hand_off)
    max_model_len = context.engine_client.max_model_len
    prompts = [
        truncate(prompt, body, max_model_len, length.max_tokens)
        for prompt in await _prompts(context, body, raw_prompts)
    ]
    for prompt, keys in zip(prompts, transfer_params, strict=True):
        if keys is not None:
            keys.num_prefix_tokens(prompt.token_ids)
    answers = await _chat_answers(context, body, prompts, answer_id)
    builder = _ChildBuilder(
        context, body, length, engine_id, hand_off, timeline, continuation, await _bad_words(context, body), answers
    )
    children = [
        child
        for index, (prompt, keys) in enumerate(zip(prompts, transfer_params, strict=True))
        for child in builder.children(prompt, index * number, number, keys)
    ]
    constraint = constraint_of(body.response_format, body.structured_outputs) if answers is None else answers.constraint
    if constraint is not None:
        await _constrain(context, children, constraint)
    generation = Generation(
        children,
        engine_client=context.engine_client,
        metrics=context.metrics,
        clock=context.clock,
        arrived=_arrived(timeline, hand_off),
        parsers="" if answers is None else answers.format.name,
        counts_reasoning=answers is not None and answers.format.has_reasoning,
    )
    if continuation is not None:
        _require_same_answer(generation, continuation)
        await context.codec.thread_offload.run_if(
            len(continuation.token_ids) > THREAD_ABOVE_TOKENS,
            generation.children[0].assembler.replay,
            continuation.token_ids,
        )
    return Plan(prompts, number, generation, length.shows_answer, continuation)


async def _constrain(context: ServerContext, children: Sequence[Child], constraint: StructuredOutputs) -> None:
    """Give each sequence its own state of the compiled constraint. Raises `RequestError`."""
    answer = children[0].request.answer_token_ids
    matchers = await context.grammars.matchers(constraint, len(children), answer)
    for child, matcher in zip(children, matchers, strict=True):
        child.request.matcher = matcher
        child.request.sampling = msgspec.structs.replace(child.request.sampling, structured_outputs=constraint)


async def _bad_words(context: ServerContext, body: GenerationRequest) -> tuple[tuple[int, ...], ...]:
    """The token sequences of the request's bad words, each at the beginning of a text and within it. Tokens of a
    longer word that contains one are not excluded, as in vLLM."""
    words = [text for word in body.bad_words or () for text in (word, f" {word}")]
    encoded = await context.codec.encode_all(words, add_special_tokens=False) if words else []
    return tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))


def timeline_of(header: str | None, now: float) -> Timeline:
    """The router's stamps (`TIMELINE_HEADER`), or the arrival at this instance. An invalid header is ignored."""
    timeline = Timeline()
    try:
        sent = msgspec.json.decode(header or "{}", type=Timeline)
    except (msgspec.DecodeError, RecursionError):
        sent = timeline
    for phase in ("arrived", "routed"):
        stamp = getattr(sent, phase)
        if stamp is not None and now - _OLDEST_STAMP_S <= stamp <= now:
            timeline.stamp(phase, stamp)
    timeline.stamp("arrived", now)
    return timeline


def answer_length(body: GenerationRequest) -> AnswerLength:
    """The bound of the answer's length. Raises `InvalidRequest` if that is less than one token.

    `echo` with `max_tokens` 0 requests the prompt alone; the engine has to generate one token to compute its
    log-probabilities.
    """
    if isinstance(body, CompletionRequest):
        if body.echo and body.max_tokens == 0:
            return AnswerLength("prompt", 1, shows_answer=False)
        return AnswerLength("prompt", 16 if body.max_tokens is None else _positive("max_tokens", body.max_tokens))
    assert isinstance(body, ChatCompletionRequest)
    if body.max_completion_tokens is not None:
        return AnswerLength("messages", _positive("max_completion_tokens", body.max_completion_tokens))
    return AnswerLength("messages", None if body.max_tokens is None else _positive("max_tokens", body.max_tokens))


@dataclass(frozen=True)
class _ChildBuilder:
    """Makes the sequences of one request."""

    context: ServerContext
    body: GenerationRequest
    length: AnswerLength
    engine_id: str
    hand_off: HandOff
    timeline: Timeline
    continuation: Continuation | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    answers: ChatAnswerSpec | None = None

    def children(
        self, prompt: Prompt, first_index: int, number: int, keys: KVTransferParams | None = None
    ) -> Iterator[Child]:
        """The `number` choices of one prompt; the first one is choice `first_index` of the request, and has the
        prompt's keys."""
        sampling = self._sampling(prompt)
        for choice in range(number):
            seed = child_seed(sampling.seed or 0, choice)
            child_sampling = msgspec.structs.replace(sampling, seed=seed)
            yield self._child(prompt, first_index + choice, child_sampling, choice == 0, keys)

    def _child(
        self, prompt: Prompt, index: int, sampling: SamplingParams, leads: bool, keys: KVTransferParams | None
    ) -> Child:
        request = Request(
            request_id=f"{self.engine_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            answer_token_ids=self.continuation.token_ids if self.continuation else [],
            sampling=sampling,
            hand_off=self.hand_off if leads else None,
            transfer_params=keys if leads else None,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt or "",
            deadline=self._deadline(),
            timeline=msgspec.structs.replace(self.timeline),
        )
        options = self._text_options(sampling)
        reader = None if self.answers is None else self.answers.reader(index, sampling.seed)
        assembler = ChoiceAssembler(index, self.context.codec.backend, prompt.token_ids, options, reader)
        waits = not leads and (self.hand_off is not None or keys is not None)
        child = Child(request, assembler, is_leader=leads, waits_for_leader=waits)
        if self.continuation is not None:
            child.continued, child.num_tokens = True, len(self.continuation.token_ids)
            child.num_cached_tokens = self.continuation.num_cached_tokens
        return child

    def _sampling(self, prompt: Prompt) -> SamplingParams:
        engine_client = self.context.engine_client
        vocab_size = engine_client.vocab_size  # the model's, which may be larger than the tokenizer's
        budget = answer_budget(
            len(prompt.token_ids), self.length.max_tokens, engine_client.max_model_len, self.length.field
        )
        sampling = sampling_params(
            self.body, max_tokens=budget, defaults=engine_client.default_sampling, default_seed=self.context.seed
        )
        sampling = msgspec.structs.replace(sampling, bad_words=self.bad_words)
        require_known_tokens(prompt.token_ids, vocab_size, self.length.field)
        require_known_tokens(list(sampling.logit_bias), vocab_size, "logit_bias")
        require_known_tokens(sampling.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        require_known_tokens(sampling.logprob_token_ids, vocab_size, "logprob_token_ids")
        require_known_tokens(sampling.stop_token_ids, vocab_size, "stop_token_ids")
        if self.continuation is not None:
            require_known_tokens(self.continuation.token_ids, vocab_size, CONTINUED)
            _require_room(len(self.continuation.token_ids), budget)
            return msgspec.structs.replace(sampling, seed=self.continuation.seed)
        if isinstance(self.hand_off, Produce):
            return msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1))
        return sampling

    def _text_options(self, sampling: SamplingParams) -> TextOptions:
        skips = self.body.skip_special_tokens is not False
        is_parsed = self.answers is not None and bool(self.answers.format.stages)
        return TextOptions(
            stops=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=skips and not is_parsed,
            hidden_tokens=self.answers.format.hidden_tokens if skips and self.answers else frozenset(),
        )

    def _deadline(self) -> float | None:
        return None if self.body.timeout is None else self.context.clock.monotonic() + self.body.timeout


async def _chat_answers(
    context: ServerContext, body: GenerationRequest, prompts: Sequence[Prompt], answer_id: str
) -> ChatAnswerSpec | None:
    """The answers that a chat request asks for; None for a completion."""
    if not isinstance(body, ChatCompletionRequest):
        return None
    (prompt,) = prompts
    is_large = len(body.tools or ()) > _MANY_TOOLS
    return await context.codec.thread_offload.run_if(is_large, chat_answers, context.parsers, body, prompt, answer_id)


async def _prompts(
    context: ServerContext, body: GenerationRequest, raw_prompts: Sequence[str | list[int]]
) -> list[Prompt]:
    if isinstance(body, CompletionRequest):
        return await completion_prompts(body, raw_prompts, context.codec, context.engine_client.max_model_len)
    assert isinstance(body, ChatCompletionRequest)
    return [await context.chat_prompt(body)]


def _positive(field: str, value: int) -> int:
    if value < 1:
        raise InvalidRequest(f"{field} must be at least 1, got {value}", param=field)
    return value


def _require_countable(number: int, num_prompts: int, max_choices: int) -> None:
    if number < 1:
        raise InvalidRequest(f"n must be at least 1, got {number}", param="n")
    if number * num_prompts > max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts times n={number} are {number * num_prompts} choices; at most {max_choices} are"
            " allowed",
            param="n" if num_prompts == 1 else "prompt",
        )


def _require_continuable(body: GenerationRequest, num_choices: int, hand_off: HandOff) -> None:
    """Raise `InvalidRequest` unless the request can be continued: a stream of one choice, without a hand-off."""
    if not body.stream or num_choices != 1 or hand_off is not None:
        raise InvalidRequest("only a stream of one choice, without a hand-off, can be continued", param=CONTINUED)


def _require_same_answer(generation: Generation, continuation: Continuation) -> None:
    """Raise `InvalidRequest` unless the answer was begun by the same model, with the same prompt and sampling."""
    if continuation.answer != generation.answer_name:
        raise InvalidRequest(
            "the answer was begun by an instance with another model, tokenizer, chat template, parser or"
            " generation_config.json than this one, which would continue it otherwise",
            param=CONTINUED,
        )


def _require_room(num_tokens: int, budget: int) -> None:
    if num_tokens >= budget:
        raise InvalidRequest(f"the answer is complete with the {num_tokens} tokens that it has", param=CONTINUED)


def _arrived(timeline: Timeline, hand_off: HandOff) -> float:
    """Arrival time of the client's request: at the prefill instance, if the ticket has it."""
    arrived = timeline.arrived or 0.0
    result = hand_off.ticket.prefill_result if isinstance(hand_off, Consume) else None
    earlier = result.timeline.arrived if result is not None else None
    return arrived if earlier is None else min(arrived, earlier)
