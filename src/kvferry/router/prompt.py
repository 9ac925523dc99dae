"""What a prompt has in common with others: names of its beginnings.

The router has no tokenizer. It names stretches of what it was sent (the JSON text of `prompt` or `messages`), each by a
hash over itself and all before it, so that two prompts share a name exactly as far as they begin alike. A prompt of
token ids also gets the names of its KV blocks, which are compared with those that instances tell of in KV events.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

_STRETCHES = ((128, 1024), (512, 4096), (2048, 32768), (8192, 16 * 2**20))
"""Bytes of a stretch, and up to where: a short prompt is told apart finely, a long one has few names. What is beyond
has none."""

_OUR_SEED = 0x6B76666572727900
_TOKENS_ROOT = 1


class Prefix:
    """The names of a prompt's beginnings, shortest first, and how many tokens each is long.

    `token_ids` are there when the client gave them; `block_keys` then names their KV blocks.
    """

    __slots__ = ("_blocks", "ends", "keys", "token_ids")

    def __init__(self, keys: Sequence[int], ends: Sequence[float], token_ids: Sequence[int] | None = None) -> None:
        self.keys, self.ends, self.token_ids = keys, ends, token_ids
        self._blocks: dict[int, list[int]] = {}

    def block_keys(self, block_size: int) -> Sequence[int]:
        """Of the full KV blocks of this size; none without token ids."""
        if self.token_ids is None:
            return ()
        if block_size not in self._blocks:
            self._blocks[block_size] = list(chain_blocks(_TOKENS_ROOT, self.token_ids, block_size))
        return self._blocks[block_size]


NO_PREFIX = Prefix((), ())


def chain_blocks(parent: int | None, token_ids: Sequence[int], block_size: int) -> Iterator[int]:
    """Names of the full blocks of `token_ids`, which follow the block named `parent` (None: they begin a prompt)."""
    key = _TOKENS_ROOT if parent is None else parent
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = xxhash.xxh3_64_intdigest(array("q", token_ids[start : start + block_size]).tobytes(), key)
        yield key


def text_prefix(text: bytes, root: bytes, tokens_per_byte: float, token_ids: Sequence[int] | None = None) -> Prefix:
    """Of a prompt's JSON text. `root`: what else decides about the KV (model, salt, tools)."""
    key = xxhash.xxh3_64_intdigest(root, _OUR_SEED)
    keys, ends, start, view = [], [], 0, memoryview(text)
    for size, limit in _STRETCHES:
        for end in range(start + size, min(len(text), limit) + 1, size):
            key = xxhash.xxh3_64_intdigest(view[start:end], key)
            keys.append(key)
            ends.append(end * tokens_per_byte)
            start = end
    return Prefix(keys, ends, token_ids)


_IDS = msgspec.json.Decoder(list[int])


def is_token_ids(text: bytes) -> bool:
    """Whether a prompt's JSON text is a list of numbers. Looks at its first characters only."""
    start = text[:64].lstrip()
    return start[:1] == b"[" and start[1:].lstrip()[:1].isdigit()


def read_token_ids(text: bytes) -> list[int] | None:
    """The numbers of such a list; None when it is something else, or a number is no token id."""
    try:
        found = _IDS.decode(text)
    except msgspec.MsgspecError:
        return None
    return found if all(0 <= one < 2**31 for one in found) else None
