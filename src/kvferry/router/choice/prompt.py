"""Which beginning a prompt shares with others, by names of its prefixes.

The router has no tokenizer. It divides what it was sent (the JSON text of `prompt` or `messages`) into sections, each
named by a hash of itself and of everything before it, so that two prompts share names exactly as far as they begin
alike. A prompt of token ids also gets the names of its KV blocks, which are compared with those in KV events.
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
"""Where the sections end, in bytes: a short prompt is told apart finely, a long one has few names. What is beyond has
none."""

_OUR_SEED = 0x6B76666572727900
_TOKENS_ROOT = 1


class Prefix(msgspec.Struct, eq=False, frozen=True):
    """The names of a prompt's prefixes, shortest first, and the number of tokens of each.

    `token_ids` are present if the client sent them; `block_keys` then names their KV blocks.
    """

    keys: Sequence[int]
    ends: Sequence[float]
    token_ids: Sequence[int] | None = None
    _blocks: dict[int, list[int]] = {}

    def block_keys(self, block_size: int) -> Sequence[int]:
        """Names of the full KV blocks of this size; none without token ids."""
        if self.token_ids is None:
            return ()
        if block_size not in self._blocks:
            self._blocks[block_size] = list(chain_blocks(_TOKENS_ROOT, self.token_ids, block_size))
        return self._blocks[block_size]


NO_PREFIX = Prefix((), ())


def chain_blocks(parent: int | None, token_ids: Sequence[int], block_size: int) -> Iterator[int]:
    """Names of the full blocks of `token_ids` that follow the block named `parent` (None: they begin a prompt)."""
    key = _TOKENS_ROOT if parent is None else parent
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = xxh3_64_intdigest(token_bytes(token_ids[start : start + block_size]), key)
        yield key


def text_prefix(text: bytes, root: bytes, tokens_per_byte: float, token_ids: Sequence[int] | None = None) -> Prefix:
    """The prefixes of a prompt's JSON text. `root`: everything else that determines the KV (model, salt, tools)."""
    ends = _ENDS[: bisect_right(_ENDS, len(text))]
    keys, tokens = list[int](), list[float]()
    key, start, view = xxh3_64_intdigest(root, _OUR_SEED), 0, memoryview(text)
    for end in ends:
        key = xxh3_64_intdigest(view[start:end], key)
        keys.append(key)
        tokens.append(end * tokens_per_byte)
        start = end
    return Prefix(keys, tokens, token_ids)


_IDS = msgspec.json.Decoder(list[int])


def is_token_ids(text: bytes) -> bool:
    """Whether a prompt's JSON text is a list of numbers. Looks at its first characters only."""
    start = text[:64].lstrip()
    return start[:1] == b"[" and start[1:].lstrip()[:1].isdigit()


def read_token_ids(text: bytes) -> list[int] | None:
    """The numbers of such a list; None if it is something else, or a number is not a token id."""
    try:
        found = _IDS.decode(text)
    except msgspec.MsgspecError:
        return None
    return found if all(0 <= one < 2**31 for one in found) else None
