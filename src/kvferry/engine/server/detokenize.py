"""Text from tokens, one at a time.

A character may be spread over several tokens, and a tokenizer may drop the space before the first word it decodes.
So nothing is given out before a character is whole, and the end of the prompt is decoded first and thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

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
