"""Log-probabilities in the three shapes clients know: completions', chat's, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvferry.core.hand_off import TokenLogprobs
from kvferry.engine.server import responses
from kvferry.engine.server.token_texts import TokenTexts

_LEAST = -9999.0
"""JSON has no minus infinity; this is what OpenAI sends."""


class LogprobWriter:
    """Writes log-probabilities; with `as_token_ids` tokens are called `token_id:123`, as vLLM offers."""

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool = False) -> None:
        self._texts = texts
        self._as_token_ids = as_token_ids

    def completion(
        self, places: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offsets: Sequence[int], num_top: int
    ) -> responses.CompletionLogprobs:
        """The `num_top` likeliest at each place and, if it is not one of them, the token itself."""
        return responses.CompletionLogprobs(
            text_offset=list(offsets),
            token_logprobs=[None if place is None else _clamp(place.logprob) for place in places],
            tokens=[self._name(token_id) for token_id in token_ids],
            top_logprobs=[None if place is None else self._top(place, num_top) for place in places],
        )

    def chat(self, places: Sequence[TokenLogprobs], num_top: int) -> responses.ChatLogprobs:
        """The `num_top` likeliest at each place, which may not contain the token itself."""
        return responses.ChatLogprobs([self._chat_token(place, num_top) for place in places])

    def prompt(self, places: Sequence[TokenLogprobs | None], num_top: int) -> responses.PromptLogprobs:
        """vLLM's form for prompts: by token id, the token itself first."""
        return [None if place is None else self._prompt_token(place, num_top) for place in places]

    def _top(self, place: TokenLogprobs, num_top: int) -> dict[str, float]:
        top = {self._name(token_id): _clamp(logprob) for token_id, logprob in _likeliest(place, num_top)}
        return {self._name(place.token_id): _clamp(place.logprob)} | top

    def _chat_token(self, place: TokenLogprobs, num_top: int) -> responses.TokenLogprob:
        top = [
            responses.TopLogprob(self._name(token_id), _clamp(logprob), list(self._texts.raw(token_id)))
            for token_id, logprob in _likeliest(place, num_top)
        ]
        name, raw = self._name(place.token_id), list(self._texts.raw(place.token_id))
        return responses.TokenLogprob(name, _clamp(place.logprob), raw, top)

    def _prompt_token(self, place: TokenLogprobs, num_top: int) -> dict[int, responses.PromptLogprob]:
        own = {place.token_id: self._prompt_logprob(place.token_id, place.logprob, place.rank)}
        top = {
            token_id: self._prompt_logprob(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(_likeliest(place, num_top), start=1)
        }
        return own | top

    def _prompt_logprob(self, token_id: int, logprob: float, rank: int) -> responses.PromptLogprob:
        return responses.PromptLogprob(_clamp(logprob), rank, self._texts.text(token_id))

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._texts.name(token_id)


def _likeliest(place: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    ranked = sorted(place.top.items(), key=lambda entry: -entry[1])
    return islice(ranked, num_top)


def _clamp(logprob: float) -> float:
    return max(logprob, _LEAST)
