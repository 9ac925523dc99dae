"""From the engine's outputs to what the client sees of one choice: text, stop strings, offsets, finish reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from kvferry.core.hand_off import TokenLogprobs
from kvferry.core.request import EngineOutput
from kvferry.engine.server.detokenize import Detokenizer
from kvferry.engine.server.stop_strings import Passed, StopStrings


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text, and which text ends it."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True


@dataclass
class Delta:
    """What is new of one choice. `offsets` says of each token where in the choice's text it begins, in characters.

    `first` marks the choice's beginning; `finish_reason` is set on its end. Text may come later than its tokens.
    """

    index: int
    first: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
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

    def feed(self, output: EngineOutput) -> Delta:
        """What `output` brings. A stop string ends the choice though the engine would go on."""
        delta = Delta(self.index, first=not self._started, prompt_logprobs=output.prompt_logprobs)
        self._started = True
        last = len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            stopped_by_token = place == last and output.finish_reason == "stop"
            shown = not stopped_by_token or self._options.include_stop
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
