"""From the engine's outputs to what the client sees of one choice: text, stop strings, offsets, finish reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.core.errors import InvalidRequest
from kvferry.core.hand_off import TokenLogprobs
from kvferry.core.request import EngineOutput

CONTINUED = "kv_transfer_params"
"""The field that brings an answer so far."""

CONTEXT_TOKENS = 8
"""How many tokens of the prompt are decoded first."""

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character; at most one less can be pending, one to a token."""

_MOST_PENDING = 64
"""More tokens than this without text are given out as far as they can be: without a bound, a run of bytes that
are no text would be decoded from its beginning with each token."""


class Detokenizer:
    """The decoding of one sequence."""

    def __init__(self, backend: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = self._new_stream()
        self._pending: list[int] = []
        for token_id in context[-CONTEXT_TOKENS:]:
            self.step(token_id)
        if len(self._pending) >= _LONGEST_CHARACTER:  # bytes that are no text, or tokens without any: not the answer's
            self._stream, self._pending = self._new_stream(), []

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes, often but not always its own."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - the library raises bare Exceptions where decoding is not monotonic
            return self._restart(keep=0)
        if text is not None:
            self._pending.clear()
            return str(text)
        return self._restart(keep=_LONGEST_CHARACTER - 1) if len(self._pending) > _MOST_PENDING else ""

    def flush(self) -> str:
        """What is left at the end: the replacement character for bytes that never became one."""
        return self._restart(keep=0)

    def _restart(self, keep: int) -> str:
        """Give out the pending tokens but the last `keep`, which may be the beginning of a character."""
        cut = len(self._pending) - keep
        done, kept = self._pending[:cut], self._pending[cut:]
        text = str(self._backend.decode(done, skip_special_tokens=self._skip_special_tokens)) if done else ""
        self._stream, self._pending = self._new_stream(), []
        return text + "".join([self.step(token_id) for token_id in kept])

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skip_special_tokens)


class Passed(msgspec.Struct, frozen=True):
    """Text that can be sent. `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Looks for `stops`; `include` leaves the one found in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> Passed:
        """What can be sent once `text` came. Without `may_stop` a whole stop string passes as any text does."""
        if not self._stops:
            return Passed(text)
        text = self._held + text
        if may_stop and (found := self._first(text)) is not None:
            self._held = ""
            return found
        cut = self._cut(text)
        self._held = text[cut:]
        return Passed(text[:cut])

    def flush(self) -> str:
        """The text that was held back; the end came before the rest of the stop string did."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> Passed | None:
        """The stop string that is complete first, as if the text had come letter by letter."""
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if not ends:
            return None
        end, stop = min(ends, key=lambda found: found[0])
        return Passed(text[: end if self._include else end - len(stop)], stop)

    def _cut(self, text: str) -> int:
        """Where the part to hold back begins."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(self._may_grow(text, start, stop) for stop in self._stops):
                return start
        return len(text)

    @staticmethod
    def _may_grow(text: str, start: int, stop: str) -> bool:
        """Whether `text` from `start` on is a beginning of `stop`, and not yet all of it."""
        return len(text) - start < len(stop) and stop.startswith(text[start:])


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text, and which text ends it."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True


class Delta(msgspec.Struct):
    """What is new of one choice. `offsets` says of each token where in the choice's text it begins, in characters.

    `first` marks the choice's beginning; `finish_reason` is set on its end. Text may come later than its tokens.
    """

    index: int
    first: bool = False
    text: str = ""
    token_ids: list[int] = []
    offsets: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceAssembler:
    """Puts one choice together; `feed` takes the engine's outputs in order, until it returns a finish reason."""

    def __init__(self, index: int, backend: Tokenizer, prompt: Sequence[int], options: TextOptions) -> None:
        self.index = index
        self._options = options
        self._detokenizer = Detokenizer(backend, prompt, skip_special_tokens=options.skip_special_tokens)
        self._stop_strings = StopStrings(options.stops, include=options.include_stop)
        self._started = False
        self._num_tokens = 0
        self._num_characters = 0

    def replay(self, token_ids: list[int]) -> None:
        """Take in an answer so far, all of which the client has. Raises `InvalidRequest` when it is complete."""
        if self.feed(EngineOutput(request_id="", token_ids=token_ids)).finish_reason is not None:
            raise InvalidRequest("the answer that is to be continued has ended by a stop string", param=CONTINUED)

    def feed(self, output: EngineOutput) -> Delta:
        """What `output` brings. A stop string ends the choice though the engine would go on."""
        delta = Delta(self.index, first=not self._started, prompt_logprobs=output.prompt_logprobs)
        self._started = True
        last = len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            stopped_by_token = place == last and output.finish_reason == "stop"
            shown = not stopped_by_token or self._options.include_stop
            if output.logprobs:
                delta.logprobs += output.logprobs[place : place + 1]
            if (stop := self._take(delta, token_id, shown=shown)) is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
                return delta
        if output.finish_reason is not None:
            self._end(delta, output)
        return delta

    def _take(self, delta: Delta, token_id: int, *, shown: bool) -> str | None:
        """One more token; returns the stop string that is complete with it."""
        delta.token_ids.append(token_id)
        delta.offsets.append(self._num_characters)
        self._num_tokens += 1
        return self._pass_on(delta, self._detokenizer.step(token_id)) if shown else None

    def _pass_on(self, delta: Delta, text: str) -> str | None:
        self._num_characters += len(text)
        passed: Passed = self._stop_strings.feed(text, may_stop=self._num_tokens > self._options.min_tokens)
        delta.text += passed.text
        return passed.stop

    def _end(self, delta: Delta, output: EngineOutput) -> None:
        """The engine ended it: what is held back goes out, unless a stop string is found in it at last."""
        delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
        if (stop := self._pass_on(delta, self._detokenizer.flush())) is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        else:
            delta.text += self._stop_strings.flush()


def joined(deltas: Iterable[Delta]) -> Delta:
    """All of a choice's deltas as one."""
    whole: Delta | None = None
    for delta in deltas:
        if whole is None:
            whole = delta
            continue
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        whole.offsets += delta.offsets
        whole.logprobs += delta.logprobs
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    assert whole is not None  # a choice has at least its end
    return whole
