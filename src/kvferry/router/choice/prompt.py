"""Keys of a prompt's prefixes, by which prompts with a common beginning are recognised.

The router has no tokenizer. It divides the JSON text of `prompt` or `messages` into sections. The key of a section is a
hash of it and of everything before it, so that two prompts share keys exactly as far as they share a prefix. A prompt
of token ids also gets the keys of its KV blocks, to be compared with KV events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from kvferry.core.blocks.block_hash import token_bytes

_ENDS = (
    *range(128, 1024, 128),
    *range(1024, 4096, 512),
    *range(4096, 32768, 2048),
    *range(32768, 16 * 2**20 + 1, 8192),
)
"""Ends of the sections, in bytes. Sections are short at the beginning of a prompt and long later. Text after the last
end has no key."""

_SEED = 0x6B76666572727900
_TOKENS_ROOT = 1


class Prefix(msgspec.Struct, eq=False, frozen=True):
    """The keys of a prompt's prefixes, shortest first, and the number of tokens of each.

    `token_ids` are present if the client sent them; `block_keys` then returns the keys of their KV blocks.
    """

    keys: Sequence[int]
    ends: Sequence[float]
    token_ids: Sequence[int] | None = None
    _blocks: dict[int, list[int]] = {}

    def block_keys(self, block_size: int) -> Sequence[int]:
        """Keys of the full KV blocks of this size; empty without token ids."""
        if self.token_ids is None:
            return ()
        if block_size not in self._blocks:
            self._blocks[block_size] = list(chain_blocks(_TOKENS_ROOT, self.token_ids, block_size))
        return self._blocks[block_size]


NO_PREFIX = Prefix((), ())


def chain_blocks(parent: int | None, token_ids: Sequence[int], block_size: int) -> Iterator[int]:
    """Keys of the full blocks of `token_ids` that follow the block with the key `parent` (None: they begin a
    prompt)."""
    key = _TOKENS_ROOT if parent is None else parent
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = xxh3_64_intdigest(token_bytes(token_ids[start : start + block_size]), key)
        yield key


def text_prefix(text: bytes, root: bytes, tokens_per_byte: float, token_ids: Sequence[int] | None = None) -> Prefix:
    """The prefixes of a prompt's JSON text. `root`: everything else that determines the KV (model, salt, tools)."""
    ends = _ENDS[: bisect_right(_ENDS, len(text))]
    keys, tokens = list[int](), list[float]()
    key, start, view = xxh3_64_intdigest(root, _SEED), 0, memoryview(text)
    for end in ends:
        key = xxh3_64_intdigest(view[start:end], key)
        keys.append(key)
        tokens.append(end * tokens_per_byte)
        start = end
    return Prefix(keys, tokens, token_ids)


_IDS = msgspec.json.Decoder(list[int])


def is_token_ids(text: bytes) -> bool:
    """True if a prompt's JSON text is a list of numbers. Reads its first characters only."""
    start = text[:64].lstrip()
    return start[:1] == b"[" and start[1:].lstrip()[:1].isdigit()


def read_token_ids(text: bytes) -> list[int] | None:
    """The token ids in a JSON list; None if it is anything else, or a number is not a token id."""
    try:
        token_ids = _IDS.decode(text)
    except msgspec.MsgspecError:
        return None
    return token_ids if all(0 <= token_id < 2**31 for token_id in token_ids) else None
