"""Names of block contents.

A block hash is the SHA-256 of (parent's hash, the block's token ids); the first block's parent is the
*root*, the hash of (model fingerprint, cache salt). Two requests therefore share a block only when model,
salt and every token up to and including the block are the same, and nobody can construct a collision.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
"""32 bytes."""


def root_hash(model_fingerprint: str, cache_salt: str = "") -> BlockHash:
    """The parent of a sequence's first block."""
    digest = hashlib.sha256()
    for part in (b"kvferry-block-v1", model_fingerprint.encode(), cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of the block that holds `token_ids` after `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` the names of the full blocks of `token_ids` that it does not have yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(next_hash(parent, token_ids[start : start + block_size]))
