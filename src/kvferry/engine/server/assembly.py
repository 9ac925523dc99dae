"""Assembles one choice for the client from the engine's outputs: text, stop strings, offsets, finish reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.core.request import EngineOutput
from kvferry.engine.server.output_parsers.answer_reader import AnswerPart, AnswerReader, NumberedCall

CONTINUED = "kv_transfer_params"
"""The request field that contains an answer so far."""

CONTEXT_TOKENS = 8
"""Tokens of the prompt that are decoded first, so that the answer's first token is decoded in context."""


class Detokenizer:
    """Decodes one sequence, token by token."""

    max_pending = 64
    """Max number of tokens without text; more are decoded as far as possible. Otherwise a run of bytes that are not
    text would be decoded from its beginning with each token."""
    max_character = 4
    """Bytes of the longest UTF-8 character; at most one byte less can be pending, with one byte for each token."""

    def __init__(self, backend: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = self._new_stream()
        self._pending: list[int] = []
        for token_id in context[-CONTEXT_TOKENS:]:
            self.step(token_id)
        if len(self._pending) >= self.max_character:  # bytes that are not text, or tokens without text
            self._stream, self._pending = self._new_stream(), []

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes: often, but not always, its own."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - the library raises bare Exceptions where decoding is not monotonic
            return self._restart(keep=0)
        if text is not None:
            self._pending.clear()
            return str(text)
        return self._restart(keep=self.max_character - 1) if len(self._pending) > self.max_pending else ""

    def flush(self) -> str:
        """The remaining text at the end; replacement characters for bytes that are not text."""
        return self._restart(keep=0)

    def _restart(self, keep: int) -> str:
        """Decode the pending tokens except the last `keep`, which may be the beginning of a character."""
        cut = len(self._pending) - keep
        done, rest = self._pending[:cut], self._pending[cut:]
        text = str(self._backend.decode(done, skip_special_tokens=self._skip_special_tokens)) if done else ""
        self._stream, self._pending = self._new_stream(), []
        return text + "".join([self.step(token_id) for token_id in rest])

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skip_special_tokens)


class SendableText(msgspec.Struct, frozen=True):
    """Text that can be sent. `stop`: the stop string that ended it, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Detects stop strings in the text; with `include`, the text contains the detected one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> SendableText:
        """The text that can be sent after `text` has arrived. With `may_stop` false, stop strings are ordinary text."""
        if not self._stops:
            return SendableText(text)
        text = self._held + text
        if may_stop and (stopped := self._first(text)) is not None:
            self._held = ""
            return stopped
        cut = self._cut(text)
        self._held = text[cut:]
        return SendableText(text[:cut])

    def flush(self) -> str:
        """The text that was held because it might begin a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> SendableText | None:
        """The stop string that would be complete first if the text arrived letter by letter."""
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if not ends:
            return None
        end, stop = min(ends, key=lambda entry: entry[0])
        return SendableText(text[: end if self._include else end - len(stop)], stop)

    def _cut(self, text: str) -> int:
        """The index from which on the text must be held."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(self._may_grow(text, start, stop) for stop in self._stops):
                return start
        return len(text)

    @staticmethod
    def _may_grow(text: str, start: int, stop: str) -> bool:
        """True if the text from `start` on is a beginning of `stop`, but not all of it."""
        return len(text) - start < len(stop) and stop.startswith(text[start:])


@dataclass(frozen=True)
class TextOptions:
    """Options of detokenization, and the stop strings."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    hidden_tokens: frozenset[int] = frozenset()
    """Tokens without text, where others of the special tokens have some."""


class Delta(msgspec.Struct):
    """The new part of one choice. `offsets`: for each token, the index in the choice's text at which it begins, in
    characters.

    `calls`: calls, or chunks of them. `first`: the choice begins; `finish_reason`: set when it ends; `ends_with_calls`:
    it has calls, and was not cut off.
    Text may come later than its tokens.
    """

    index: int
    first: bool = False
    text: str = ""
    reasoning: str = ""
    calls: list[NumberedCall] = []
    token_ids: list[int] = []
    offsets: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ends_with_calls: bool = False


class ChoiceAssembler:
    """Assembles one choice: `feed` takes the engine's outputs in order, until it returns a finish reason. Without a
    `reader`, all text is content."""

    def __init__(
        self,
        index: int,
        backend: Tokenizer,
        prompt: Sequence[int],
        options: TextOptions,
        reader: AnswerReader | None = None,
    ) -> None:
        self.index = index
        self._options = options
        self._reader = reader
        context = [token for token in prompt[-CONTEXT_TOKENS:] if token not in options.hidden_tokens]
        self._detokenizer = Detokenizer(backend, context, skip_special_tokens=options.skip_special_tokens)
        self._stop_strings = StopStrings(options.stops, include=options.include_stop)
        self._started = False
        self._num_tokens = 0
        self.num_reasoning_tokens = 0
        """Number of tokens after which the answer was within reasoning."""
        self._num_characters = 0

    def replay(self, token_ids: list[int]) -> None:
        """Feed an answer so far, which the client already has. Raises `InvalidRequest` if it is complete."""
        if self.feed(EngineOutput(request_id="", token_ids=token_ids)).finish_reason is not None:
            raise InvalidRequest("the answer to be continued has already ended with a stop string", param=CONTINUED)

    def feed(self, output: EngineOutput) -> Delta:
        """The delta that `output` adds. A stop string ends the choice even though the engine would continue."""
        delta = Delta(self.index, first=not self._started, prompt_logprobs=output.prompt_logprobs)
        self._started = True
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            stopped_by_token = position == last and output.finish_reason == "stop" and not output.is_complete
            shown = (not stopped_by_token or self._options.include_stop) and token_id not in self._options.hidden_tokens
            if output.logprobs:
                delta.logprobs += output.logprobs[position : position + 1]
            if (stop := self._take(delta, token_id, shown=shown)) is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
                self._finish(delta)
                return delta
            if self._reader is not None and self._reader.is_complete:
                delta.finish_reason = "stop"
                self._finish(delta)
                return delta
        if output.finish_reason is not None:
            self._end(delta, output)
            self._finish(delta)
        return delta

    def _take(self, delta: Delta, token_id: int, *, shown: bool) -> str | None:
        """Add one token. Returns the stop string that it completes, if any."""
        delta.token_ids.append(token_id)
        delta.offsets.append(self._num_characters)
        self._num_tokens += 1
        stop = self._emit(delta, self._detokenizer.step(token_id)) if shown else None
        self.num_reasoning_tokens += self._reader is not None and self._reader.is_reasoning
        return stop

    def _emit(self, delta: Delta, text: str) -> str | None:
        self._num_characters += len(text)
        passed: SendableText = self._stop_strings.feed(text, may_stop=self._num_tokens > self._options.min_tokens)
        self._add(delta, passed.text)
        return passed.stop

    def _add(self, delta: Delta, text: str) -> None:
        if self._reader is None:
            delta.text += text
        else:
            self._add_parts(delta, self._reader.feed(text))

    def _finish(self, delta: Delta) -> None:
        """Add what the reader holds."""
        if self._reader is None:
            return
        self._add_parts(delta, self._reader.finish())
        is_complete = delta.finish_reason == "stop" and not self._reader.has_open_call
        delta.ends_with_calls = self._reader.has_calls and is_complete

    @staticmethod
    def _add_parts(delta: Delta, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, NumberedCall):
                delta.calls.append(part)
            elif part.kind == "reasoning":
                delta.reasoning += part.text
            else:
                delta.text += part.text

    def _end(self, delta: Delta, output: EngineOutput) -> None:
        """End the choice, because the engine has ended the sequence: held text is released, unless it contains a stop
        string."""
        delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
        if (stop := self._emit(delta, self._detokenizer.flush())) is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        else:
            self._add(delta, self._stop_strings.flush())


def merge_deltas(deltas: Iterable[Delta]) -> Delta:
    """All deltas of a choice as one."""
    merged: Delta | None = None
    for delta in deltas:
        if merged is None:
            merged = delta
            continue
        merged.text += delta.text
        merged.reasoning += delta.reasoning
        merged.calls += delta.calls
        merged.token_ids += delta.token_ids
        merged.offsets += delta.offsets
        merged.logprobs += delta.logprobs
        merged.finish_reason, merged.stop_reason = delta.finish_reason, delta.stop_reason
        merged.ends_with_calls = delta.ends_with_calls
    assert merged is not None  # every choice has at least a last delta
    return merged
