"""Text to tokens and back. Owns the server's use of the tokenizer.

The backend (the `tokenizers` library) is called directly: `transformers` reconfigures it in each call, which fails when
two threads do so at once. Long texts are encoded in a thread, so that the event loop can send other answers meanwhile;
the backend's batch calls release the GIL, its single calls do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from kvferry.engine.server.thread_offload import ThreadOffload

THREAD_ABOVE_CHARACTERS = 4096
"""Longer texts are encoded in a thread; about a millisecond of work."""

THREAD_ABOVE_TOKENS = 4096
"""Longer token sequences are decoded in a thread."""


@lru_cache(maxsize=4)
def _sizes(tokenizer: Any) -> tuple[int, int]:
    """The number of a tokenizer's tokens, and the length of the longest one in characters. Cached, because many servers
    of one process may have the same tokenizer."""
    vocab = tokenizer.backend_tokenizer.get_vocab()
    return len(vocab), max(map(len, vocab), default=1)


class TextCodec:
    """A tokenizer, used on one event loop and in the threads of `thread_offload`."""

    def __init__(self, tokenizer: Any) -> None:
        self.thread_offload = ThreadOffload()
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        # Some tokenizer files contain a truncation that was meant for training.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size, self.longest_token_chars = _sizes(tokenizer)
        """Number of tokens, and length of the longest one in characters."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of `text`. Special tokens that are written out in the text are recognized."""
        return (await self.encode_all([text], add_special_tokens=add_special_tokens))[0]

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The tokens of each text."""
        in_thread = sum(map(len, texts)) > THREAD_ABOVE_CHARACTERS
        return await self.thread_offload.run_if(in_thread, self._encode_all, texts, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`."""
        in_thread = len(token_ids) > THREAD_ABOVE_TOKENS
        return await self.thread_offload.run_if(in_thread, self._decode, token_ids, skip_special_tokens)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as written in the vocabulary."""
        return await self.thread_offload.run_if(len(token_ids) > THREAD_ABOVE_TOKENS, self._token_strings, token_ids)

    def num_tokens(self, text: str) -> int:
        """The number of tokens in `text`, without special tokens. Blocks the caller for as long as encoding takes."""
        return len(self._encoding(text, False))

    def _encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [list(self._encoding(text, add_special_tokens).ids) for text in texts]

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [str(self.backend.id_to_token(token_id) or "") for token_id in token_ids]

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])


_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE (GPT-2) writes each byte as a printable character; this maps the characters back to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenTexts:
    """Texts and bytes of tokens, computed once for each token id."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._alphabet = _byte_level_alphabet()
        self._cache: dict[int, tuple[str, bytes]] = {}
        # Decoded after another token, a token keeps the space that some decoders strip from the beginning of a text.
        self._anchor = list(backend.encode("a", add_special_tokens=False).ids)
        self._anchor_text = self._decode(self._anchor)

    def name(self, token_id: int) -> str:
        """The token as OpenAI's `logprobs` write it: its text, or `bytes:\\xf0\\x9f` if its bytes are only a part of a
        character."""
        text, raw = self._look_up(token_id)
        if _REPLACEMENT in text and raw != text.encode():
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text

    def text(self, token_id: int) -> str:
        """The token's text, with replacement characters for bytes that are not text."""
        return self._look_up(token_id)[0]

    def raw(self, token_id: int) -> bytes:
        """The token's bytes. The bytes of consecutive tokens, concatenated, are UTF-8."""
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        entry = self._cache.get(token_id)
        if entry is None:
            entry = self._cache[token_id] = self._compute(token_id)
        return entry

    def _compute(self, token_id: int) -> tuple[str, bytes]:
        decoded = self._decode([*self._anchor, token_id])
        if decoded.startswith(self._anchor_text):
            text = decoded[len(self._anchor_text) :]
        else:
            text = self._decode([token_id])
        return text, self._bytes_of_part(token_id) if _REPLACEMENT in text else text.encode()

    def _bytes_of_part(self, token_id: int) -> bytes:
        written = self._backend.id_to_token(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(match[1], 16)])
        if all(character in self._alphabet for character in written):
            return bytes(self._alphabet[character] for character in written)
        return written.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))
