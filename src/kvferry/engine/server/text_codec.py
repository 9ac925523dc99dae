"""Text to tokens and back. Owns the server's use of the tokenizer; knows nothing of requests.

The backend (the `tokenizers` library) is called directly: `transformers`' own call re-configures the backend each
time, which fails when two threads do it at once. What takes long runs in a thread, so that the event loop goes on
sending other people's tokens; encoding gives the interpreter lock up meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

THREAD_ABOVE_CHARACTERS = 4096
"""Longer texts are encoded in a thread; about a millisecond's work."""

THREAD_ABOVE_TOKENS = 4096
"""Longer token sequences are decoded in a thread."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TextCodec:
    """A tokenizer, used from one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        # Some tokenizer files bring a truncation that was meant for training.
        self.backend.no_truncation()
        self.backend.no_padding()
        vocab = self.backend.get_vocab()
        self.vocab_size = len(vocab)
        self.longest_token = max(map(len, vocab), default=1)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of `text`; special tokens written out in it are taken as such."""
        return await in_thread_if(len(text) > THREAD_ABOVE_CHARACTERS, self._encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`."""
        big = len(token_ids) > THREAD_ABOVE_TOKENS
        return await in_thread_if(big, self._decode, token_ids, skip_special_tokens)

    def written(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it."""
        return [str(self.backend.id_to_token(token_id) or "") for token_id in token_ids]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


async def in_thread_if(
    big: bool, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call `function` here when the work is small, in a thread when it is `big`."""
    if big:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)
